"""Checkpoints of ours: tensors read whole are checked against their hash."""

from __future__ import annotations

from pathlib import Path

from ... import files
from ...errors import CheckpointError
from ..source import Source, Stored
from ..weights import open_native
from ..weights import recognise as kind_of


def recognise(path: Path) -> bool:
    """Whether ``path`` holds a manifest."""
    return kind_of(path) == "native"


def open(path: Path) -> Source:  # noqa: A001 - the word for it
    """The weights, under the names of the weight file."""
    with files.raising(CheckpointError):
        return Stored(open_native(path))
