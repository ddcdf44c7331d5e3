"""Run reads, writes or transfers in parallel, or ahead; the first error ends them."""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from . import files

T = TypeVar("T")
R = TypeVar("R")
_BUFFER = 4 << 20  # bytes handed to the disk at a time
MAX_SPACE = 1 << 20  # bytes that a buffer has beyond those, so that what ends there fits in
_SPACE = _BUFFER + MAX_SPACE
_AHEAD = 2  # results that wait to be taken


def in_parallel(work: Callable[[T], object], items: Iterable[T], workers: int) -> None:
    """``work(item)`` for every item; items that have not begun when one fails are not done."""
    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(work, item) for item in items]
        try:
            for done in running:
                done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def ahead(work: Callable[[T], R], items: Iterable[T]) -> Generator[R, None, None]:
    """``work(item)`` for every item, in order, computed in a thread while earlier ones are used."""
    with ThreadPoolExecutor(1) as pool:
        running: deque[Future[R]] = deque()
        try:
            for item in items:
                running.append(pool.submit(work, item))
                if len(running) > _AHEAD:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _two_buffers() -> list[memoryview]:
    # mmap, not bytearray: O_DIRECT takes memory only from the start of a page.
    memory = mmap.mmap(-1, 2 * _SPACE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if advice := getattr(mmap, "MADV_HUGEPAGE", None):
        with contextlib.suppress(OSError):  # a kernel without them
            # Of huge pages 4 MiB are one request to the disk; of small ones many, each page with an
            # entry of its own: a GiB took 0.56 s in place of 0.29 (virtio, Linux 6.18).
            memory.madvise(advice)
    return [memoryview(memory)[:_SPACE], memoryview(memory)[_SPACE:]]


class ByteStream:
    """Fills ``file`` past the page cache; of two page-aligned buffers, one is written while the
    other is filled."""

    def __init__(self, file: files.File) -> None:
        self._file = file
        self._buffers = _two_buffers()
        self._filled = 0
        self._offset = 0  # in the file, of the buffer being filled
        self._pool = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def __enter__(self) -> ByteStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._pool:
            if kind is None:
                self._hand_over()
                self._wait()
                self._file.sync()

    def write(self, data: bytes | memoryview) -> None:
        """Add ``data``, which may change afterwards. ``OSError`` if an earlier write failed."""
        view = memoryview(data)
        while view:
            count = min(len(view), _BUFFER - self._filled)
            self.space(count)[:] = view[:count]
            self.add(count)
            view = view[count:]

    def space(self, size: int) -> memoryview:
        """The place of the next ``size`` bytes, at most ``MAX_SPACE``: to be filled, then added."""
        return self._buffers[0][self._filled : self._filled + size]

    def add(self, size: int) -> None:
        """Add what ``space(size)`` was filled with. ``OSError`` if an earlier write failed."""
        self._filled += size
        if self._filled >= _BUFFER:
            self._hand_over()

    def _hand_over(self) -> None:
        self._wait()
        data = self._buffers[0][: self._filled]
        full, rest = data[:_BUFFER], data[_BUFFER:]
        self._writing = self._pool.submit(self._file.write_at, self._offset, full)
        self._offset, self._filled = self._offset + len(full), len(rest)
        self._buffers.reverse()
        self._buffers[0][: len(rest)] = rest

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None
