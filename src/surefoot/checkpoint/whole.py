"""A folder that others read appears at one stroke, too: written aside, flushed, then renamed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from .. import files
from ..errors import CheckpointError, SurefootError
from .commit import new_nonce, part_of


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """As ``appearing``. Raises ``CheckpointError`` if there is anything of that name, too."""
    with files.raising(CheckpointError, f"cannot write {target}"):
        refuse_taken(target)
    with appearing(target) as folder:
        yield folder


@contextlib.contextmanager
def appearing(target: Path, error: type[SurefootError] = CheckpointError) -> Iterator[Path]:
    """A folder to write into, which becomes ``target`` when the block ends; removed if it fails.

    An empty folder may be there already. Raises ``error`` if the disk fails.
    """
    with files.raising(error, f"cannot write {target}"):
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
