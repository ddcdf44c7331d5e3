"""Folders as transformers writes them: one ``model.safetensors``, or several files and an index."""

from __future__ import annotations

from pathlib import Path

from ...errors import CheckpointError
from ...storage import files
from ..sources.source import FolderSource, TensorSource
from ..weights import detect_layout as kind_of
from ..weights import open_huggingface


def recognise(path: Path) -> bool:
    """Whether ``path`` contains ``model.safetensors`` or its index."""
    return kind_of(path) == "huggingface"


def open(path: Path) -> TensorSource:  # noqa: A001 - the word for it
    """The weights, under the names of the files."""
    with files.raising(CheckpointError):
        return FolderSource(open_huggingface(path))
