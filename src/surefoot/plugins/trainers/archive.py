"""Archives of ``torch.save``, one pickle and the bytes of tensors, read without loading.

The pickle is read as inert records (``pickles``). A tensor's values are located in the file, and
read from there as plain bytes, part by part.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from io import RawIOBase
from pathlib import Path
from typing import Any, Protocol

import torch

from ...errors import CheckpointError
from ...parallel.box import Box
from .pickles import Record, read_record

_LOCAL = struct.Struct("<4s22xHH")  # of a zip entry: signature, lengths of name and extra field
_LARGEST = 1 << 30  # bytes of the pickle
_TENSOR, _ATTACHED = "_rebuild_tensor_v2", "_rebuild_from_type_v2"
_PARAMETERS = ("_rebuild_parameter", "_rebuild_parameter_with_state")
_STORAGES = {
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
}


class Readable(Protocol):
    """A file, as far as this module needs it."""

    @property
    def path(self) -> Path:
        """Its path."""

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``offset`` on."""

    def read(self, offset: int, length: int) -> bytes:
        """The bytes from ``offset`` on."""


@dataclass(frozen=True)
class Values:
    """The position of a tensor's values, in row-major order without gaps."""

    file: Readable
    offset: int  # of the first byte in the file
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of values."""
        return Box.whole(self.shape).size


@dataclass(frozen=True)
class Archive:
    """An archive in ``file`` from byte ``offset`` on. ``where`` names it in errors."""

    file: Readable
    offset: int
    length: int
    where: str
    any_name: bool = False  # whether records stand for names that torch does not know, too

    @cached_property
    def content(self) -> Any:
        """The saved object, with a record in place of every tensor and object."""
        return read_record(self._pickle, self.where, any_name=self.any_name)

    def values(self, record: object, name: str) -> Values:
        """The position of the tensor that ``record`` stands for, one block of the archive."""
        where = f"{self.where}: {name[:200]}"
        try:
            record = _unwrapped(record)
            if not isinstance(record, Record) or record.name != _TENSOR:
                raise CheckpointError(f"{where}: not a plain tensor; read it with PyTorch")
            (_, kind, key, _, _), first, shape, strides = record.args[:4]
            dtype, shape = _STORAGES[kind], tuple(shape)
            expected = _strides(shape)
            pairs = zip(strides, expected, shape, strict=True)
            is_dense = all(a == b for a, b, n in pairs if n > 1)
            entry = self._entries[f"data/{key}"]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{where}: not a tensor as PyTorch saves it ({error})") from None
        size = Box.whole(shape).size
        if size and not is_dense:
            raise CheckpointError(
                f"{where}: not a plain tensor of {list(shape)} (transposed, or a part of another); "
                "read it with PyTorch"
            )
        if not 0 <= first * dtype.itemsize <= (first + size) * dtype.itemsize <= entry.file_size:
            raise CheckpointError(f"{where}: {entry.file_size} bytes are too few for {list(shape)}")
        start = self.offset + self._start(entry) + first * dtype.itemsize
        return Values(self.file, start, dtype, shape)

    @cached_property
    def _entries(self) -> Mapping[str, zipfile.ZipInfo]:
        try:
            with zipfile.ZipFile(_View(self.file, self.offset, self.length)) as archive:
                listed = archive.infolist()
        except (zipfile.BadZipFile, ValueError) as error:
            raise CheckpointError(f"{self.where}: not an archive of torch.save ({error})") from None
        return {entry.filename.partition("/")[2]: entry for entry in listed}

    @cached_property
    def _pickle(self) -> bytes:
        entry = self._entries.get("data.pkl")
        if entry is None or entry.file_size > _LARGEST:
            raise CheckpointError(f"{self.where}: not an archive of torch.save (no data.pkl)")
        return self.file.read(self.offset + self._start(entry), entry.file_size)

    def _start(self, entry: zipfile.ZipInfo) -> int:
        """The start of an entry's bytes, after a check that all of them are in the archive."""
        if entry.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{self.where}: it is compressed; read it with PyTorch")
        head = self.file.read(self.offset + entry.header_offset, _LOCAL.size)
        signature, name, extra = _LOCAL.unpack(head)
        start: int = entry.header_offset + _LOCAL.size + name + extra
        if signature != b"PK\x03\x04" or start + entry.file_size > self.length:
            raise CheckpointError(f"{self.where}: the archive is damaged")
        return start


def _unwrapped(record: Any) -> Any:
    """The record of the plain tensor inside that of a parameter, or of one with attributes."""
    if isinstance(record, Record) and record.name == _ATTACHED:
        build, _, arguments = record.args[:3]
        is_record = isinstance(build, type) and issubclass(build, Record)
        record = build(*arguments) if is_record else None
    if isinstance(record, Record) and record.name in _PARAMETERS:
        record = record.args[0]
    return record


def _strides(shape: tuple[int, ...]) -> list[int]:
    found: list[int] = []
    step = 1
    for n in reversed(shape):
        found.insert(0, step)
        step *= max(n, 1)
    return found


class _View(RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, file: Readable, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._at))
        self._file.read_into(self._offset + self._at, view[:count])
        self._at += count
        return count
