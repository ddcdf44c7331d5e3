"""A layout: a kind of folder of weights, and how to look into it. No torch.

Names and headers are read, never a tensor. What differs between layouts is a field or a method
here, so that nobody compares a layout's name. The defaults are those of a model of another tool,
with the log of its training perhaps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ...storage import files
from ..disk import strict_json, trainer_state
from ..sources.weights import PICKLES, FolderWeights, TensorLocation
from ..state.roles import MODEL

Locations = Mapping[str, TensorLocation]  # by name


@dataclass(frozen=True)
class SavedFolder:
    """One save of a training: what to open, and its description."""

    path: Path
    step: int | None
    num_bytes: int


class Layout(ABC):
    """A kind of folder of weights."""

    name: ClassVar[str]
    """As in ``LAYOUTS`` and in ``--json``."""

    title: ClassVar[str]
    """For people."""

    written_by: ClassVar[str] = "Trainer"
    """Who writes runs of it, in ``ckpt ls``."""

    has_manifest: ClassVar[bool] = False
    """Whether hashes, states and the parent are in a manifest: a Surefoot checkpoint."""

    is_adapter: ClassVar[bool] = False
    """Whether its weights are always those of an adapter."""

    has_adapter_config: ClassVar[bool] = False
    """Whether its ``adapter_config.json`` means that the weights are an adapter's."""

    is_assembled: ClassVar[bool] = False
    """Whether Surefoot joins its files for transformers, if ``model.safetensors`` is missing."""

    is_whole_model: ClassVar[bool] = False
    """Whether such a folder is all of a model or adapter, not only its weights."""

    pickle_suffixes: ClassVar[tuple[str, ...]] = PICKLES
    """Of files beside its weights that are pickles."""

    @abstractmethod
    def recognise(self, folder: Path) -> bool:
        """Whether ``folder`` is of this layout and no other. Reads names only."""

    @abstractmethod
    def open(self, folder: Path) -> FolderWeights:
        """The weights, by the names in the files; a ``CheckpointError`` if they are damaged."""

    def open_all(self, folder: Path, roles: frozenset[str] | None) -> Locations:
        """Every tensor by its full name, ``role/name``, of all networks, or of some ``roles``."""
        if roles is not None and MODEL not in roles:
            return {}
        return {f"{MODEL}/{name}": place for name, place in self.open(folder).tensors.items()}

    def states(self, folder: Path) -> Mapping[str, Any]:
        """The states without their tensors, or what the folder logged of its training."""
        return logged_states(folder)

    def small_file(self, folder: Path, name: str) -> bytes | None:
        """The content of a file beside the weights; None if there is none."""
        return read_small(folder, name)

    def why_not(self, folder: Path) -> str | None:
        """Why a folder that looks like one of its kind cannot be read; None if none does."""
        return None

    def names_save(self, path: Path) -> bool:
        """Whether the name of a file selects one save of the folder that contains it."""
        return False

    def model_near(self, folder: Path) -> Path | None:
        """The folder with the ``config.json`` of a model: ``folder``, or one around it."""
        return folder if files.exists(folder / "config.json") else None

    def saves_in(self, folder: Path) -> Sequence[SavedFolder]:
        """The saves of a training in one folder; none if every save has a folder of its own."""
        return ()


def logged_states(folder: Path) -> Mapping[str, Any]:
    """What the Hugging Face Trainer logged, if it did."""
    if not files.exists(folder / trainer_state.NAME):
        return {}
    return {"trainer_state": trainer_state.load(folder)}


def read_small(folder: Path, name: str) -> bytes | None:
    """The content of a file; None if there is none."""
    if not files.exists(folder / name):
        return None
    with files.open_file(folder / name) as file:
        return files.read_all(file, strict_json.MAX_BYTES)
