"""Folders as PyTorch's distributed checkpoints write them with Hugging Face storage."""

from __future__ import annotations

from pathlib import Path

from ... import files
from ...errors import CheckpointError
from ..source import Source, Stored
from ..weights import open_dcp
from ..weights import recognise as kind_of


def recognise(path: Path) -> bool:
    """Whether ``path`` holds files of boxes, ``shard-00001-model-00001-of-00001.safetensors``."""
    return kind_of(path) == "dcp"


def open(path: Path) -> Source:  # noqa: A001 - the word for it
    """The tensors, each put together from its boxes."""
    with files.raising(CheckpointError):
        return Stored(open_dcp(path))
