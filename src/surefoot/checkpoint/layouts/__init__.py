"""Folders of weights, of Surefoot and foreign ones, opened as tensor sources: one module each
and one line here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from ...storage import files
from ..sources.source import FolderSource, TensorSource, read_whole
from ..weights import MODEL, MODEL_INDEX, open_weights
from ..weights import detect_layout as kind_of
from . import dcp, huggingface, mindspore, native, peft


class Layout(Protocol):
    """What a module of this folder offers."""

    def recognise(self, path: Path) -> bool:
        """Whether the folder is of this layout. Reads names only."""

    def open(self, path: Path) -> TensorSource:
        """The weights in the folder; a ``CheckpointError`` if they are damaged."""


LAYOUTS: dict[str, Layout] = {
    "native": native,
    "peft": peft,
    "huggingface": huggingface,
    "dcp": dcp,
    "mindspore": mindspore,
}


def open_folder(path: Path | str) -> TensorSource:
    """The weights in a folder of any layout. A ``CheckpointError`` says what to do instead."""
    return FolderSource(open_weights(Path(path)))


def open_named(path: Path | str, model: Path | None = None) -> TensorSource:
    """The same under Hugging Face's names, also for MindSpore's folders. ``model`` is the folder
    of their model, if it is not around them.
    """
    folder = Path(path)
    is_theirs = kind_of(folder) == "mindspore"
    return mindspore.under_other_names(folder, model) if is_theirs else open_folder(folder)


def scattered(folder: Path | str) -> dict[str, torch.Tensor] | None:
    """The weights of a checkpoint of several ranks, or of MindSpore, unsharded under Hugging
    Face's names; None for any other folder, which ``from_pretrained`` reads itself.
    """
    path = Path(folder)
    kind, has_model = kind_of(path), any(files.exists(path / n) for n in (MODEL, MODEL_INDEX))
    if kind not in ("native", "mindspore") or has_model:
        return None
    return read_named(path)


def read_named(path: Path, model: Path | None = None) -> dict[str, torch.Tensor]:
    """All tensors of ``open_named``, in memory."""
    source = open_named(path, model)
    return {name: read_whole(source, name) for name in source.shapes()}
