"""A safetensors file open for ranged reads, its header checked first. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...errors import CheckpointError
from ...parallel.box import Box
from ...storage import files
from .header import Header, TensorEntry, header_length, num_bytes, parse, ranges_of


class TensorFile:
    """The tensors of the file, and the bytes of any part of it."""

    def __init__(self, file: files.File) -> None:
        self._file = file
        self.path = file.path
        size = file.size
        first = file.read(0, min(8, size))
        text = file.read(8, header_length(first, size, str(file.path)))
        self.head_hash = files.digest(first + text)
        self.header: Header = parse(text, size, str(file.path))

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def entry(self, key: str) -> TensorEntry:
        """The position of tensor ``key``."""
        if key not in self.header.entries:
            raise CheckpointError(f"{self.path}: it contains no tensor {key!r}")
        return self.header.entries[key]

    def read_into(self, key: str, view: memoryview, box: Box | None = None) -> str:
        """Fill ``view`` with all bytes of ``key``, or of a box of it; returns their hash."""
        entry = self.entry(key)
        box = box or Box.whole(entry.shape)
        size = num_bytes(entry.dtype, box.shape)
        if len(view) != size:
            raise ValueError(f"{key}: the buffer has {len(view)} bytes, expected {size}")
        digest, done = files.Hash(), 0
        for offset, length in self._blocks(entry, box):
            block = view[done : done + length]
            self._file.read_into(offset, block)
            digest.update(block)
            done += length
        return digest.hex()

    def read_box_into(self, key: str, box: Box, view: memoryview) -> None:
        """Fill ``view`` with the bytes of ``box`` in row-major order; no others are read."""
        entry = self.entry(key)
        whole = Box.whole(entry.shape)
        if len(box.shape) != len(entry.shape) or box not in whole:
            raise CheckpointError(f"{self.path}: {key}: {box} is outside of shape {entry.shape}")
        done = 0
        for offset, length in ranges_of(entry, box):
            self._file.read_into(offset, view[done : done + length])
            done += length

    def hash(self, key: str, box: Box | None = None) -> str:
        """The hash of the bytes of a tensor, or of a box of it, in one block of memory."""
        entry = self.entry(key)
        digest = files.Hash()
        buffer = memoryview(bytearray(min(files.BLOCK, entry.num_bytes)))
        for offset, length in self._blocks(entry, box or Box.whole(entry.shape)):
            self._file.read_into(offset, buffer[:length])
            digest.update(buffer[:length])
        return digest.hex()

    def _blocks(self, entry: TensorEntry, box: Box) -> Iterator[tuple[int, int]]:
        """The positions of the bytes of ``box``, in its order: offset and length of every block."""
        for offset, length in ranges_of(entry, box):
            for at in range(0, length, files.BLOCK):
                yield offset + at, min(files.BLOCK, length - at)


def open_path(path: Path) -> TensorFile:
    """Open a file by its path, links followed: the hub's cache consists of links."""
    return opened(files.open_file(path))


def open_inside(folder: Path, name: str) -> TensorFile:
    """Open a file inside ``folder``, without following links."""
    return opened(files.open_inside(folder, name))


def opened(file: files.File) -> TensorFile:
    """The same of an open file, which is closed if it is none of tensors."""
    try:
        return TensorFile(file)
    except (OSError, CheckpointError):
        file.close()
        raise
