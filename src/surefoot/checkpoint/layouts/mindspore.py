"""Folders as MindSpore Transformers writes them: full, a folder for every rank, or iterations."""

from __future__ import annotations

from pathlib import Path

from ...errors import CheckpointError
from ...storage import files
from ..mindspore.names import family_of, heads_near, to_huggingface
from ..sources.source import FolderSource, TensorSource
from ..weights import detect_layout as kind_of
from ..weights import open_mindspore


def recognise(path: Path) -> bool:
    """Whether ``path`` contains MindSpore's files, and no model of Hugging Face's."""
    return kind_of(path) == "mindspore"


def open(path: Path) -> TensorSource:  # noqa: A001 - the word for it
    """The weights under MindSpore's names, each combined from its ranks' slices."""
    with files.raising(CheckpointError):
        return FolderSource(open_mindspore(path))


def under_other_names(path: Path, model: Path | None = None) -> TensorSource:
    """The weights, of the model in the folder ``model`` if it is not around them, under Hugging
    Face's names. Raises ``CheckpointError`` if they have none.
    """
    source = open(path)
    family = family_of(source.shapes())
    return source if family is None else to_huggingface(source, family, heads_near(path, model))
