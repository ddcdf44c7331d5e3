"""Disk usage of folders whose files may be hard links to the same data."""

from __future__ import annotations

import contextlib
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_SECTOR = 512  # bytes; the unit of st_blocks on every system


@dataclass(frozen=True)
class DiskUsage:
    """A file on disk: its inode, its number of hard links, and its blocks in bytes."""

    inode: tuple[int, int]  # device, number
    num_names: int
    num_bytes: int  # its length
    disk_bytes: int  # the blocks it takes


def stored(folder: Path) -> list[DiskUsage]:
    """Every name of a file below ``folder``, links not followed.

    Files that disappear meanwhile, or cannot be read, are skipped. Clones (of Btrfs or XFS) count
    as separate files: no system call reports what they share.
    """
    usages, pending = [], [folder]
    while pending:  # no recursion: folders may be nested deeper than Python's stack
        with contextlib.suppress(OSError):
            for path in sorted(pending.pop().iterdir()):
                with contextlib.suppress(OSError):
                    status = path.lstat()
                    if stat.S_ISDIR(status.st_mode):
                        pending.append(path)
                    elif stat.S_ISREG(status.st_mode):
                        inode, blocks = (status.st_dev, status.st_ino), status.st_blocks * _SECTOR
                        usages.append(DiskUsage(inode, status.st_nlink, status.st_size, blocks))
    return usages


def num_names(path: Path) -> int:
    """How many names (hard links) a file has."""
    return path.lstat().st_nlink


def added(folders: Iterable[Sequence[DiskUsage]]) -> list[int]:
    """Bytes on the disk that each folder adds to those before it: a shared file counts once."""
    seen: set[tuple[int, int]] = set()
    totals = []
    for names in folders:
        new = {name.inode: name.disk_bytes for name in names if name.inode not in seen}
        seen |= new.keys()
        totals.append(sum(new.values()))
    return totals


def freed(folders: Iterable[Sequence[DiskUsage]]) -> int:
    """Bytes that are freed if all ``folders`` are deleted: without hard links elsewhere."""
    names = [name for folder in folders for name in folder]
    going = Counter(name.inode for name in names)
    last = {name.inode: name.disk_bytes for name in names if going[name.inode] >= name.num_names}
    return sum(last.values())
