"""A folder that others read appears at one stroke, too: written aside, flushed, then renamed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from .. import files
from ..errors import CheckpointError
from .commit import new_nonce, part_of


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which becomes ``target`` when the block ends; removed if it fails.

    Raises ``CheckpointError`` if there is something of that name, or the disk fails.
    """
    with files.raising(CheckpointError, f"cannot write {target}"):
        refuse_taken(target)
        folder = part_of(target, new_nonce())
        files.make_folder(target.parent)
        files.new_folder(folder)
        try:
            yield folder
            files.sync_folder(folder)
            files.rename(folder, target)
            files.sync_folder(target.parent)
        except BaseException:
            files.remove_tree(folder)
            raise


def refuse_taken(target: Path) -> None:
    """Raise ``CheckpointError`` if there is anything of that name."""
    if files.exists(target):
        raise CheckpointError(f"{target}: it exists already; choose another folder")
