"""Folders as MindSpore Transformers writes them: whole, a folder for every rank, or iterations."""

from __future__ import annotations

from pathlib import Path

from ... import files
from ...errors import CheckpointError
from ..mindspore.names import family_of, heads_near, to_huggingface
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


def under_other_names(path: Path, model: Path | None = None) -> Source:
    """The weights, of the model in the folder ``model`` if it is not around them, under Hugging
    Face's names. Raises ``CheckpointError`` if they have none."""
    source = open(path)
    family = family_of(source.shapes())
    return source if family is None else to_huggingface(source, family, heads_near(path, model))
