"""Folders as transformers writes them: one ``model.safetensors``, or shards and an index."""

from __future__ import annotations

from pathlib import Path

from ... import files
from ...errors import CheckpointError
from ..source import Source, Stored
from ..weights import open_huggingface
from ..weights import recognise as kind_of


def recognise(path: Path) -> bool:
    """Whether ``path`` holds ``model.safetensors`` or its index."""
    return kind_of(path) == "huggingface"


def open(path: Path) -> Source:  # noqa: A001 - the word for it
    """The weights, under the names of the files."""
    with files.raising(CheckpointError):
        return Stored(open_huggingface(path))
