"""Boxes of tensors in safetensors, as PyTorch's distributed checkpoints write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ...errors import CheckpointError
from ...storage import files
from ..sources.weights import PICKLES, Weights
from .dcp_boxes import locations, open_boxes, shard_files
from .foreign import logged_states, model_of, read_small
from .huggingface import has_model
from .layout import Locations, SavedFolder
from .native import is_native
from .peft import is_peft


def is_dcp(folder: Path) -> bool:
    """Whether it has files of boxes, ``shard-00001-model-00001-of-00001.safetensors``, alone."""
    is_taken = is_native(folder) or is_peft(folder) or has_model(folder)
    return not is_taken and bool(shard_files(folder))


@dataclass(frozen=True)
class DCP:
    """A distributed checkpoint of PyTorch with Hugging Face storage."""

    name: ClassVar[str] = "dcp"
    title: ClassVar[str] = "PyTorch DCP"
    has_manifest: ClassVar[bool] = False
    is_adapter: ClassVar[bool] = False
    has_adapter_config: ClassVar[bool] = False
    is_assembled: ClassVar[bool] = False
    is_whole_model: ClassVar[bool] = False
    pickle_suffixes: ClassVar[tuple[str, ...]] = PICKLES

    def recognise(self, folder: Path) -> bool:
        """Whether it has files of boxes."""
        return is_dcp(folder)

    def open(self, folder: Path) -> Weights:
        """The tensors, each joined from its boxes."""
        with files.raising(CheckpointError):
            return Weights(self.name, folder, locations(open_boxes(folder)))

    def open_all(self, folder: Path, roles: frozenset[str] | None) -> Locations:
        """The model's; there is no other tensor."""
        return model_of(self.open(folder), roles)

    def states(self, folder: Path) -> Mapping[str, Any]:
        """The log of the Hugging Face Trainer, if there is one."""
        return logged_states(folder)

    def small_file(self, folder: Path, name: str) -> bytes | None:
        """Any file of the folder."""
        return read_small(folder, name)

    def saves_in(self, folder: Path) -> Sequence[SavedFolder]:
        """None: every checkpoint has a folder of its own."""
        return ()
