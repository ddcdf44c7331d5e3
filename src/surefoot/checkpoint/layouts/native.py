"""Surefoot checkpoints: tensors that are read completely are checked against their hash."""

from __future__ import annotations

from pathlib import Path

from ...errors import CheckpointError
from ...storage import files
from ..sources.source import FolderSource, TensorSource
from ..weights import detect_layout as kind_of
from ..weights import open_native


def recognise(path: Path) -> bool:
    """Whether ``path`` contains a manifest."""
    return kind_of(path) == "native"


def open(path: Path) -> TensorSource:  # noqa: A001 - the word for it
    """The weights, under the names of the weight file."""
    with files.raising(CheckpointError):
        return FolderSource(open_native(path))
