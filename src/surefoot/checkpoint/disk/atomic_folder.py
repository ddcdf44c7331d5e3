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
from .commit import claim, clean_leftovers


@contextlib.contextmanager
def new_folder(target: Path, *, may_be_empty: bool = False) -> Iterator[Path]:
    """A temporary folder, which becomes ``target`` when the block ends; deleted if it fails.

    Leftovers of killed processes that wrote to ``target`` are deleted first. Raises
    ``CheckpointError`` if ``target`` exists (with ``may_be_empty``: and is not an empty folder), or
    the disk fails.
    """
    said = f"cannot write {target}"
    with files.raising(CheckpointError, said):
        if not (may_be_empty and files.is_folder(target) and not files.list_folder(target)):
            refuse_taken(target)
        files.make_folder(target.parent)
        clean_leftovers(target)
        held = claim(target, files.open_folder)
        folder = held.path
        with held:
            try:
                with files.raising(CheckpointError, said):  # while the disk is as it was found
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
