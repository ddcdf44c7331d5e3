"""What a conversion starts from: a folder, and views of its weights that targets take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from ..sources.copying import DtypeName, Progress
from ..sources.source import TensorSource

RewardHead = Literal["score", "v_head"]


class OptionError(ValueError):
    """Options of a target that do not go together, or mean nothing for this folder."""


@dataclass(frozen=True)
class WholeModel:
    """A model with its adapter merged, as transformers has it."""

    weights: TensorSource
    small: Mapping[str, bytes]
    folder: Path  # of its configuration
    global_batch_size: int | None = None  # of the run that trained it
    sign: Callable[[Path], object] = lambda _: None
    """Writes a receipt into the new folder, if an export is to have one."""


@dataclass(frozen=True)
class Hints:
    """What the user said of the folder to convert."""

    base: str | None = None
    trust_pickle: bool = False
    reading: Mapping[str, object] = field(default_factory=dict)
    """The options of the folder's layout, by name."""


class Origin(Protocol):
    """A folder to convert. Every view is lazy: a target opens only what it writes."""

    @property
    def folder(self) -> Path:
        """Its path."""

    @property
    def base(self) -> Path | None:
        """The folder of the base that the user named."""

    @property
    def reading(self) -> Mapping[str, object]:
        """The options of its layout that the user named."""

    def adapter_base(self) -> Path | None:
        """The folder of an adapter's base; None for a full model."""

    def weights(self) -> TensorSource:
        """The weights as stored, under Hugging Face's names."""

    def whole(
        self,
        dtype: DtypeName | None = None,
        *,
        reward_head: RewardHead = "score",
        trust_remote_code: bool = False,
    ) -> WholeModel:
        """The model; an adapter is merged into its base."""


@dataclass(frozen=True)
class Done:
    """Notes about the folder that was written."""

    notes: Mapping[str, object] = field(default_factory=dict)  # for --json
    words: str = ""  # for people


@dataclass(frozen=True, kw_only=True)
class Target(ABC):
    """What ``export`` and ``ckpt convert --to NAME`` write. Its fields are their options."""

    suffix: ClassVar[str] = ""
    """Of the file that it writes; empty if it writes a folder."""
    may_not_open: ClassVar[bool] = False
    """Whether transformers cannot open all that it writes, so that a failure is no fault."""
    servers: ClassVar[Sequence[str]] = ()
    """Commands that serve what was written, in place of ``{}``; printed."""
    package: ClassVar[str | None] = None
    """The package of Python that it needs."""

    @property
    def hints(self) -> Hints:
        """What its options say of the folder to convert: those that ``Hints`` has."""
        hints = {hint.name for hint in fields(Hints)}
        return Hints(**{f.name: getattr(self, f.name) for f in fields(self) if f.name in hints})

    @abstractmethod
    def write(self, origin: Origin, target: Path, progress: Progress) -> Done:
        """Write the new folder ``target``, which appears when all of it is written."""


@dataclass(frozen=True, kw_only=True)
class WeightsTarget(Target):
    """The options of a target that is written from the weights in any folder."""

    dtype: DtypeName | None = None
    """Of the weights; the optimizer's state stays."""

    trust_pickle: bool = False
    """Read the pickles of a checkpoint of DeepSpeed, or of PyTorch's DCP, as inert records."""


@dataclass(frozen=True, kw_only=True)
class ModelTarget(WeightsTarget):
    """The same, where the base of the weights may be named."""

    base: str | None = None
    """The base model of an adapter if it moved, or of foreign weights (DCP, DeepSpeed)."""
