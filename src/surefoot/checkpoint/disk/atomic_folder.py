"""Create a folder atomically: write to a temporary folder, flush, rename.

The writer locks the temporary folder, so that the next conversion to the same place knows whether
to delete it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...errors import CheckpointError
from ...storage import files
from .commit import clean_beside, new_nonce, part_of

_ATTEMPTS = 100


@contextlib.contextmanager
def new_folder(target: Path, *, may_be_empty: bool = False) -> Iterator[Path]:
    """A temporary folder, which becomes ``target`` when the block ends; deleted if it fails.

    Leftovers of killed processes that wrote to ``target`` are deleted first. Raises
    ``CheckpointError`` if ``target`` exists (with ``may_be_empty``: and is not an empty folder), or
    the disk fails.
    """
    with files.raising(CheckpointError, f"cannot write {target}"):
        if not (may_be_empty and files.is_folder(target) and not files.list_folder(target)):
            refuse_taken(target)
        files.make_folder(target.parent)
        clean_beside(target)
        held = _start(target)
        folder = held.path
        with held:
            try:
                yield folder
                files.sync_folder(folder)
                files.rename(folder, target)
                files.sync_folder(target.parent)
            except BaseException:
                files.remove_tree(folder)
                raise


def write_small(folder: Path, small: Mapping[str, bytes]) -> None:
    """Companion files, which may be in subfolders."""
    for name, data in small.items():
        files.make_folder((folder / name).parent)
        files.write_new(folder / name, data)


def refuse_taken(target: Path) -> None:
    """Raise ``CheckpointError`` if the name exists."""
    if files.exists(target):
        raise CheckpointError(f"{target}: it exists already; choose another folder")


def _start(target: Path) -> files.File:
    """A new temporary folder, open and locked."""
    for _ in range(_ATTEMPTS):
        folder = part_of(target, new_nonce())
        files.new_folder(folder)
        with contextlib.suppress(FileNotFoundError):  # cleaned away before it could be opened
            held = files.open_folder(folder)
            if _is_mine(held):
                return held
            held.close()
    raise CheckpointError(f"{target.parent}: another process keeps deleting the temporary folder")


def _is_mine(held: files.File) -> bool:
    try:
        held.lock()  # where there are no locks, nobody cleans either
    except BlockingIOError:
        return False  # a cleaner was faster
    return held.is_at(held.path)
