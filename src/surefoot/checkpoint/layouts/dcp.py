"""Folders as PyTorch's distributed checkpoints write them with Hugging Face storage."""

from __future__ import annotations

from pathlib import Path

from ...errors import CheckpointError
from ...storage import files
from ..sources.source import FolderSource, TensorSource
from ..weights import detect_layout as kind_of
from ..weights import open_dcp


def recognise(path: Path) -> bool:
    """Whether ``path`` contains files of boxes,
    ``shard-00001-model-00001-of-00001.safetensors``.
    """
    return kind_of(path) == "dcp"


def open(path: Path) -> TensorSource:  # noqa: A001 - the word for it
    """The tensors, each combined from its boxes."""
    with files.raising(CheckpointError):
        return FolderSource(open_dcp(path))
