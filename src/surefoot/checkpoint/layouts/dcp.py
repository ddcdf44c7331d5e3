"""Boxes of tensors in safetensors, as PyTorch's distributed checkpoints write them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError
from ...storage import files
from ..sources.weights import FolderWeights
from .dcp_boxes import locations, open_boxes, shard_files
from .huggingface import HuggingFace
from .layout import Layout
from .native import Native
from .peft import PEFT


@dataclass(frozen=True)
class DCP(Layout):
    """A distributed checkpoint of PyTorch with Hugging Face storage."""

    name = "dcp"
    title = "PyTorch DCP"
    written_by = ""

    def recognise(self, folder: Path) -> bool:
        """Whether it has files ``shard-00001-model-00001-of-00001.safetensors`` alone."""
        is_taken = any(other.recognise(folder) for other in (Native(), PEFT(), HuggingFace()))
        return not is_taken and bool(shard_files(folder))

    def open(self, folder: Path) -> FolderWeights:
        """The tensors, each joined from its boxes."""
        with files.raising(CheckpointError):
            return FolderWeights(self.name, folder, locations(open_boxes(folder)))
