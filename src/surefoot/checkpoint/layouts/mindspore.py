"""Folders as MindSpore Transformers writes them: whole, a folder for every rank, or iterations."""

from __future__ import annotations

from pathlib import Path

from ... import files
from ...errors import CheckpointError
from ..source import Source, Stored
from ..weights import open_mindspore
from ..weights import recognise as kind_of


def recognise(path: Path) -> bool:
    """Whether ``path`` holds MindSpore's files, and no model of Hugging Face's."""
    return kind_of(path) == "mindspore"


def open(path: Path) -> Source:  # noqa: A001 - the word for it
    """The weights under MindSpore's names, each put together from its ranks' slices."""
    with files.raising(CheckpointError):
        return Stored(open_mindspore(path))
