"""Folders of weights, ours and others', opened as sources: one module each and one line here."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from ..source import Source, Stored
from ..weights import open_weights
from . import huggingface, native, peft


class Layout(Protocol):
    """What a module of this folder offers."""

    def recognise(self, path: Path) -> bool:
        """Whether the folder is of this layout. Reads names only."""

    def open(self, path: Path) -> Source:
        """The weights in the folder; a ``CheckpointError`` if they are damaged."""


LAYOUTS: dict[str, Layout] = {"native": native, "peft": peft, "huggingface": huggingface}


def open_folder(path: Path | str) -> Source:
    """The weights in a folder of any layout. ``CheckpointError``s say what to do instead."""
    return Stored(open_weights(Path(path)))
