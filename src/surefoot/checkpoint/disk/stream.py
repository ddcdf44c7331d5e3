"""Write consecutive bytes to a file, past the page cache, with two buffers. No torch."""

from __future__ import annotations

import mmap
from concurrent.futures import Future, ThreadPoolExecutor

from ...storage import files

_BUFFER = 4 << 20  # bytes handed to the disk at a time


class ByteStream:
    """Fills ``file``; of two page-aligned buffers, one is written while the other is filled."""

    def __init__(self, file: files.File) -> None:
        self._file = file
        self._buffers = [memoryview(mmap.mmap(-1, _BUFFER)) for _ in range(2)]
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
            self._buffers[0][self._filled : self._filled + count] = view[:count]
            self._filled += count
            view = view[count:]
            if self._filled == _BUFFER:
                self._hand_over()

    def _hand_over(self) -> None:
        self._wait()
        full = self._buffers[0][: self._filled]
        self._writing = self._pool.submit(self._file.write_at, self._offset, full)
        self._offset, self._filled = self._offset + self._filled, 0
        self._buffers.reverse()

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None
