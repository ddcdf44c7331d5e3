"""Boxes of tensors in safetensors, as PyTorch's distributed checkpoints write them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError
from ...storage import files
from ..sources.weights import FolderWeights
from .dcp_boxes import locations, open_boxes, shard_files
from .huggingface import has_model
from .layout import Layout
from .native import is_native
from .peft import is_peft


def is_dcp(folder: Path) -> bool:
    """Whether it has files of boxes, ``shard-00001-model-00001-of-00001.safetensors``, alone."""
    is_taken = is_native(folder) or is_peft(folder) or has_model(folder)
    return not is_taken and bool(shard_files(folder))


@dataclass(frozen=True)
class DCP(Layout):
    """A distributed checkpoint of PyTorch with Hugging Face storage."""

    name = "dcp"
    title = "PyTorch DCP"

    def recognise(self, folder: Path) -> bool:
        """Whether it has files of boxes."""
        return is_dcp(folder)

    def open(self, folder: Path) -> FolderWeights:
        """The tensors, each joined from its boxes."""
        with files.raising(CheckpointError):
            return FolderWeights(self.name, folder, locations(open_boxes(folder)))
