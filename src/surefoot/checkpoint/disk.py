"""What folders really take on the disk, where several names may lead to one file."""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_SECTOR = 512  # bytes; the unit of st_blocks on every system


@dataclass(frozen=True)
class Stored:
    """A file as the disk knows it: its number, how many names it has, and what it takes."""

    inode: tuple[int, int]  # device, number
    num_names: int
    num_bytes: int  # its length
    disk_bytes: int  # the blocks it takes


def stored(folder: Path) -> list[Stored]:
    """Every name of a file below ``folder``, links not followed; what vanishes meanwhile is not."""
    return list(_stored(folder))


def _stored(folder: Path) -> Iterator[Stored]:
    for path in folder.rglob("*"):
        try:
            found = path.lstat()
        except OSError:  # removed meanwhile, or not ours to see
            continue
        if stat.S_ISREG(found.st_mode):
            inode = (found.st_dev, found.st_ino)
            yield Stored(inode, found.st_nlink, found.st_size, found.st_blocks * _SECTOR)


def added(folders: Iterable[Sequence[Stored]]) -> list[int]:
    """Bytes on the disk that each folder adds to those before it: a shared file counts once."""
    seen: set[tuple[int, int]] = set()
    totals = []
    for names in folders:
        new = {name.inode: name.disk_bytes for name in names if name.inode not in seen}
        seen |= new.keys()
        totals.append(sum(new.values()))
    return totals


def freed(folders: Iterable[Sequence[Stored]]) -> int:
    """Bytes that come free when all ``folders`` go: of files that have no other name elsewhere."""
    names = [name for folder in folders for name in folder]
    going = Counter(name.inode for name in names)
    last = {name.inode: name.disk_bytes for name in names if going[name.inode] >= name.num_names}
    return sum(last.values())
