"""A safetensors file open for ranged reads, its header checked before anything else. No torch."""

from __future__ import annotations

from pathlib import Path

from .. import files
from ..errors import CheckpointError
from .box import Box
from .header import ITEM_SIZES, Entry, Header, header_length, parse


class TensorFile:
    """What the file holds, and the bytes of any part of it."""

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
        """Give the file back."""
        self._file.close()

    def entry(self, key: str) -> Entry:
        """Where tensor ``key`` lies."""
        if key not in self.header.entries:
            raise CheckpointError(f"{self.path}: it holds no tensor {key!r}")
        return self.header.entries[key]

    def read_into(self, key: str, view: memoryview) -> str:
        """Fill ``view`` with all bytes of ``key``; their hash."""
        entry = self.entry(key)
        if len(view) != entry.num_bytes:
            raise ValueError(f"{key}: {len(view)} bytes do not hold {entry.num_bytes}")
        digest = files.Hash()
        for at in range(0, len(view), files.BLOCK):
            block = view[at : at + files.BLOCK]
            self._file.read_into(entry.offset + at, block)
            digest.update(block)
        return digest.hex()

    def read_box_into(self, key: str, box: Box, view: memoryview) -> None:
        """Fill ``view`` with the bytes of ``box`` in row-major order, reading no others."""
        entry = self.entry(key)
        whole = Box.whole(entry.shape)
        if len(box.shape) != len(entry.shape) or box not in whole:
            raise CheckpointError(f"{self.path}: {key}: {box} is outside of shape {entry.shape}")
        item = ITEM_SIZES[entry.dtype]
        done = 0
        for first, count in box.runs_in(whole):
            self._file.read_into(entry.offset + first * item, view[done : done + count * item])
            done += count * item

    def hash(self, key: str) -> str:
        """The hash of the tensor's bytes, whatever their number, in one block of memory."""
        entry = self.entry(key)
        digest = files.Hash()
        buffer = memoryview(bytearray(min(files.BLOCK, entry.num_bytes)))
        for at in range(0, entry.num_bytes, files.BLOCK):
            block = buffer[: min(files.BLOCK, entry.num_bytes - at)]
            self._file.read_into(entry.offset + at, block)
            digest.update(block)
        return digest.hex()


def open_path(path: Path) -> TensorFile:
    """Open a file by its path, links followed: the hub's cache is made of links."""
    return _opened(files.open_file(path))


def open_inside(folder: Path, name: str) -> TensorFile:
    """Open a file that truly lies inside ``folder``, no link followed."""
    return _opened(files.open_inside(folder, name))


def _opened(file: files.File) -> TensorFile:
    try:
        return TensorFile(file)
    except (OSError, CheckpointError):
        file.close()
        raise
