"""What a conversion starts from: a folder, views of its weights that targets take, and the small
files beside them: configuration, tokenizer, an adapter's settings."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch

from ...errors import CheckpointError, ModelError, counted
from ...storage import files
from ...storage.files import read_json
from ...storage.weight_files import is_adapted
from ..disk.folder import companions_of, open_checkpoint
from ..disk.manifest import is_safetensors
from ..layouts.detection import has_manifest, small_file
from ..layouts.opening import open_folder
from ..sources.copying import DtypeName, Progress
from ..sources.source import Renamed, TensorSource
from ..sources.weights import ADAPTER_CONFIG

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


_CONFIG = "config.json"
_OF_RUN = {"state.json", "recipe.yaml", "trainer_state.json"}


def companions(base: Path, source: TensorSource) -> dict[str, bytes]:
    """The companions of the weights in ``base``, its configuration changed to fit ``source``."""
    fitted = configs(base, source) if files.exists(base / _CONFIG) else {}
    return companions_of(base, base) | fitted


def named_as(source: TensorSource, base: Path) -> TensorSource:
    """``source`` under the names that ``base`` uses."""
    base_names, names = set(open_folder(base).shapes()), source.shapes().keys()
    # A module around the model puts its own name before every tensor's. The longest name ends no
    # other one of the model, so what stands before it in ``source`` is that prefix.
    longest = max(base_names, key=len, default="")
    prefix = next((n.removesuffix(longest) for n in names if n.endswith(f".{longest}")), "")
    without_prefix = {name.removeprefix(prefix): name for name in names}
    if not base_names <= names and base_names <= without_prefix.keys():
        source = Renamed(source, without_prefix)
        names = source.shapes().keys()
    if missing := sorted(base_names - names):
        raise CheckpointError(
            f"weights of another model than {base}: of its {counted(len(base_names), 'tensor')} "
            f"{counted(len(missing), 'is', 'are')} missing (for example {missing[0]})"
        )
    return source


def refuse_adapter(folder: Path, source: TensorSource) -> None:
    """Raise ``CheckpointError`` if ``source``, the weights of another tool, has an adapter."""
    if adapter_tensor := next(filter(is_adapted, source.shapes()), None):
        raise CheckpointError(
            f"{folder}: it contains an adapter ({adapter_tensor}); write it with `surefoot ckpt "
            f"convert {folder} ADAPTER --to peft --trust-pickle`, and merge that with `surefoot "
            "export`"
        )


def adapter_files(folder: Path) -> dict[str, bytes]:
    """The companions of an adapter, without the files of the run that trained it."""
    if has_manifest(folder):
        saved_names = open_checkpoint(folder).manifest.files.keys() - _OF_RUN
        names = [name for name in saved_names if not is_safetensors(name)]
    else:
        names = [ADAPTER_CONFIG, *companions_of(folder, folder)]
    contents = {name: small_file(folder, name) for name in sorted(names)}
    return {name: data for name, data in contents.items() if data is not None}


def configs(
    folder: Path,
    source: TensorSource,
    changes: Mapping[str, object] | None = None,
    stop_token_ids: tuple[int, ...] = (),
) -> dict[str, bytes]:
    """The two configuration files of ``folder`` for ``source``, with ``changes`` to config.json.
    Raises ``ModelError`` if the files of ``folder`` contain quantized weights."""
    changes = changes or {}
    config = {**read_config(folder / _CONFIG), **changes}
    if isinstance(stored := config.get("quantization_config"), dict):
        raise ModelError(
            f"{folder}: its weights are quantized ({stored.get('quant_method')}), so they can be "
            "neither cast nor merged with an adapter; open both with PEFT, or pass the model that "
            "they were made from as --base"
        )
    config.pop("quantization_config", None)  # None: the weights were dequantized
    inner = config.get("text_config")
    if isinstance(inner, dict):
        inner.update({name: value for name, value in changes.items() if name in inner})
    config.pop("torch_dtype", None)  # the old name
    config["dtype"] = _main_dtype(source)
    config_files = {"config.json": _json(config)}
    path = folder / "generation_config.json"
    generation = read_config(path) if path.is_file() else {}
    eos_ids = generation.get("eos_token_id")
    if not isinstance(eos_ids, list):
        eos_ids = [] if eos_ids is None else [eos_ids]
    if eos_ids := list(dict.fromkeys([*eos_ids, *stop_token_ids])):
        generation["eos_token_id"] = eos_ids[0] if len(eos_ids) == 1 else eos_ids
    if generation:
        config_files[path.name] = _json(generation)
    return config_files


def _main_dtype(source: TensorSource) -> str:
    """The type most of the weights have."""
    sizes: dict[torch.dtype, int] = {}
    shapes = source.shapes()
    for name, dtype in source.dtypes().items():
        if dtype.is_floating_point:
            sizes[dtype] = sizes.get(dtype, 0) + prod(shapes[name])
    return str(max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32))[len("torch.") :]


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in a file beside a model. Raises ``ModelError``."""
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected a JSON object, found {str(content)[:40]}")
    return content


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
