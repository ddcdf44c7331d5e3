"""Whether the pictures of encoded rows are what they were, before the first step: by length, inode
and times, as bases are, and where one of these has moved, by content.

    <cache>/media/<key>.stamps    int64, four numbers of each picture; behind them their hash
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from ...storage import files
from ...storage.parallel_work import in_parallel
from ..data_order import Index
from ..example import MEDIA_COLUMN
from ..store.cache import EncodedStore
from .files import MediaFiles, has_file

_NUMBERS = 4  # length, inode, mtime and ctime in nanoseconds; zeros: not known
_SETTLED = 2_000_000_000  # younger times may stay equal in spite of a write, on coarse clocks
_WORKERS, _TOGETHER = 8, 4096  # pictures whose turn comes at once


def first_changed(media: MediaFiles, store: EncodedStore, began: float | None = None) -> str | None:
    """The name of a picture of ``store`` that is another one now, or none; None if all are as they
    were. Encoding, if it is over now, ``began`` then: what is older was read by it."""
    digests = _digests(store)
    if not digests or media.cache is None:
        return None
    paths, now = list(digests), np.zeros((len(digests), _NUMBERS), np.int64)

    def stat(first: int) -> None:
        for index in range(first, min(first + _TOGETHER, len(paths))):
            with contextlib.suppress(OSError, ValueError):
                found = os.lstat(media.place(paths[index]))
                now[index] = found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns

    in_parallel(stat, range(0, len(paths), _TOGETHER), _WORKERS)
    times = now[:, 2:].max(1)
    path = media.cache / f"{files.digest(f'{store.content} {media.folder}'.encode())}.stamps"
    before = _read(path, len(paths))
    if began is not None:
        before[times < began * 1e9 - _SETTLED] = now[times < began * 1e9 - _SETTLED]
    changed: list[str] = []

    def compare(index: int) -> None:
        if not media.is_same(paths[index], digests[paths[index]]):
            changed.append(paths[index])

    is_known = (now == before).all(1) & before.any(1)
    in_parallel(compare, np.flatnonzero(~is_known).tolist(), _WORKERS)
    if changed:
        return min(changed)
    now[times > time.time_ns() - _SETTLED] = 0
    if began is not None or (now != before).any():
        data = now.tobytes()
        with contextlib.suppress(OSError):  # a cache that can only be read
            files.make_folder(media.cache)
            files.write_aside(path, data + files.digest(data).encode())
    return None


def _digests(store: EncodedStore) -> dict[str, str]:
    """The digest of each picture, by its path."""
    column = store.features.get(MEDIA_COLUMN)
    if column is None or not column.offsets[-1]:
        return {}
    data, digests = column.flat[:].tobytes(), dict[str, str]()
    for start, end in pairwise(column.offsets.tolist()):
        for path, digest, *_ in json.loads(data[start:end] or b"[]"):
            # replaced while it was encoded: one of the two is not what is there
            digests[path] = digest if digests.get(path, digest) == digest else ""
    return {path: digest for path, digest in digests.items() if has_file(path)}


def _read(path: Path, count: int) -> Index:
    """The numbers of ``count`` pictures; zeros if they are missing or damaged."""
    none, size = np.zeros((count, _NUMBERS), np.int64), count * _NUMBERS * 8
    try:
        with files.open_file(path) as file:
            data = files.read_all(file, size + 64)
    except (OSError, ValueError):
        return none
    if data[size:] != files.digest(data[:size]).encode():
        return none
    return np.frombuffer(data[:size], np.int64).reshape(count, _NUMBERS).copy()
