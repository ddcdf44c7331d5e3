"""A file of numbers that is hashed block by block: while it is written, and again when a block is
first read.

Slices are read from the disk, not mapped: a file that is truncated while it is in use is noticed,
where a mapping would end the process (SIGBUS).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...errors import DataError
from ...storage import files

BLOCK = 64 << 10  # bytes: hashed in 5 us; of a shuffled file, an example is in one or two blocks
Sums = NDArray[np.uint64]
Repair = Callable[[str], None]  # writes the files of a folder again, given the reason


class BlockHash:
    """xxh3-64 of each block of the bytes that are added, one after another."""

    def __init__(self) -> None:
        self._state, self._filled = xxhash.xxh3_64(), 0
        self._sums = array("Q")

    def update(self, data: memoryview) -> None:
        """Add ``data``."""
        while data:
            part = data[: BLOCK - self._filled]
            self._state.update(part)
            self._filled, data = self._filled + len(part), data[len(part) :]
            if self._filled == BLOCK:
                self._end_block()

    def sums(self) -> Sums:
        """The hash of each block, the last of which may be shorter."""
        if self._filled:
            self._end_block()
        return np.array(self._sums, np.uint64)

    def _end_block(self) -> None:
        self._sums.append(self._state.intdigest())
        self._state, self._filled = xxhash.xxh3_64(), 0


class CheckedFile:
    """The numbers of a file, as an array of which slices without a step can be read."""

    def __init__(
        self, file: files.File, path: Path, dtype: type[np.generic], sums: Sums, repair: Repair
    ) -> None:
        """``path`` is where the file is found again after a ``repair``."""
        self.dtype, self._num_bytes = np.dtype(dtype), file.size
        self._file, self._path, self._sums, self._repair = file, path, sums, repair
        self._is_checked = bytearray(len(sums))  # 1 for each block that was; quicker than an array
        self._lock = Lock()  # of the repair: a thread may read ahead

    def __len__(self) -> int:
        return self._num_bytes // self.dtype.itemsize

    def __getitem__(self, part: slice) -> NDArray[Any]:
        width, file = self.dtype.itemsize, self._file
        start, stop, step = part.indices(len(self))
        assert step == 1, "every number of a slice is read"
        start, end = start * width, max(start, stop) * width
        try:
            numbers = self._read(file, start, end)
        except DamagedCacheError as error:
            numbers = self._read(self._mended(file, error), start, end)
        numbers.flags.writeable = False
        return numbers.view(self.dtype)

    def check(self) -> None:
        """Check all blocks. Raises ``DamagedCacheError``."""
        for start in range(0, self._num_bytes, 64 * BLOCK):
            self._read(self._file, start, min(start + 64 * BLOCK, self._num_bytes))

    def _read(self, file: files.File, start: int, end: int) -> NDArray[np.uint8]:
        """The bytes from ``start`` to ``end``. With blocks that were not read yet, complete blocks
        are read, and hashed."""
        first, last = start // BLOCK, -(-end // BLOCK)
        if 0 not in self._is_checked[first:last]:
            return self._bytes(file, start, end)
        low = first * BLOCK
        data = self._bytes(file, low, min(last * BLOCK, self._num_bytes))
        for block in range(first, last):
            piece = data[block * BLOCK - low : (block + 1) * BLOCK - low]
            if xxhash.xxh3_64_intdigest(piece.data) != self._sums[block]:
                raise DamagedCacheError(f"{self._path.name} does not match its checksum")
            self._is_checked[block] = 1
        return data[start - low : end - low]

    def _bytes(self, file: files.File, start: int, end: int) -> NDArray[np.uint8]:
        data = np.empty(end - start, np.uint8)
        try:
            file.read_into(start, data.data)
        except OSError as error:
            raise DamagedCacheError(f"{self._path.name}: {error.strerror}") from error
        return data

    def _mended(self, damaged: files.File, why: DamagedCacheError) -> files.File:
        """The file as it is after a repair. Raises ``DataError``: there is nothing that repairs it,
        or its numbers are others now."""
        with self._lock:
            if self._file is damaged:  # else another thread was faster
                self._repair(str(why))
                with files.raising(DataError, "data.cache_dir"):
                    self._file = files.open_file(self._path)
                self._is_checked = bytearray(len(self._sums))
                try:
                    self.check()
                except DamagedCacheError as error:
                    raise DataError(
                        f"data.cache_dir: {self._path.parent}: {error}, even after its dataset "
                        "was encoded again: the dataset gives other tokens now, or the disk fails"
                    ) from error
            return self._file


class DamagedCacheError(Exception):
    """A file is missing, or differs from what was written."""
