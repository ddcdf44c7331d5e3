"""Safetensors files: the header, and a file open for ranged reads, its header checked first.

A file is 8 bytes of header length (little-endian), the header (JSON, padded with spaces), then the
tensors' bytes without holes. Tensors of wider dtypes come first, so that each is aligned. No torch.

``plan_save`` says which tensor is stored in which file at which byte: tensors are not split, files
have a bounded size and Hugging Face's names. A file of boxes has in its header the name, full shape
and start of each: the convention of PyTorch's distributed checkpoints in safetensors
(``DCP_SHARDING_INFO``), so that PyTorch reads these files. A file without it contains unsharded
tensors.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...parallel.sharding import Box
from ...storage import files
from . import strict_json


# By reads at positions, not through a memory map: where a mapped file is cut short, SIGBUS ends the
# process, and no message says why (docs/decisions/0012).
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
        entry, digest = self.entry(key), files.Hash()
        box = box or Box.whole(entry.shape)
        if len(view) != (size := num_bytes(entry.dtype, box.shape)):
            raise ValueError(f"{key}: the buffer has {len(view)} bytes, expected {size}")
        self.read_box_into(key, box, view, digest)
        return digest.hexdigest()

    def read_box_into(
        self, key: str, box: Box, view: memoryview, digest: files.Hash | None = None
    ) -> None:
        """Fill ``view`` with the bytes of ``box`` in row-major order; no others are read.
        ``digest`` is fed with them."""
        entry = self.entry(key)
        whole = Box.whole(entry.shape)
        if len(box.shape) != len(entry.shape) or box not in whole:
            raise CheckpointError(f"{self.path}: {key}: {box} is outside of shape {entry.shape}")
        done = 0
        for offset, length in ranges_of(entry, box):
            self._file.read_into(offset, view[done : done + length], digest)
            done += length

    def hash(self, key: str, box: Box | None = None) -> str:
        """The hash of the bytes of a tensor, or of a box of it, in one block of memory."""
        entry = self.entry(key)
        digest = files.Hash()
        buffer = memoryview(bytearray(min(files.BLOCK, entry.num_bytes)))
        for offset, length in ranges_of(entry, box or Box.whole(entry.shape)):
            for at in range(0, length, files.BLOCK):
                count = min(files.BLOCK, length - at)
                self._file.read_into(offset + at, buffer[:count], digest)
        return digest.hexdigest()

    def hash_blocks(self, key: str, box: Box, size: int) -> Iterator[tuple[int, str]]:
        """The number and the hash of each block of ``size`` bytes of a tensor that has bytes of
        ``box``."""
        for number, (offset, length) in self.blocks(key, box, size).items():
            yield number, files.digest(self._file.read(offset, length))

    def blocks(self, key: str, box: Box, size: int) -> dict[int, tuple[int, int]]:
        """The first byte and the length of each of these blocks, by its number."""
        entry, touched = self.entry(key), set[int]()
        for offset, length in ranges_of(entry, box):
            first = offset - entry.offset
            touched |= {*range(first // size, (first + length - 1) // size + 1)}
        places = {number: number * size for number in sorted(touched)}
        return {
            number: (entry.offset + at, min(size, entry.num_bytes - at))
            for number, at in places.items()
        }


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


MAX_HEADER = 100_000_000  # bytes; what the reference implementation allows
ALIGNMENT = 64  # bytes; tensor data starts on a cache line, so that a mapped file is aligned too

ITEM_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: its dtype, its shape and its first byte, from the file's start."""

    dtype: str  # a key of ITEM_SIZES
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Length of the tensor's data."""
        return prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True)
class Header:
    """All tensors of a file, and its free-text metadata."""

    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    data_start: int  # bytes before the first tensor
    file_size: int


def ranges_of(entry: TensorEntry, box: Box) -> Iterator[tuple[int, int]]:
    """The first byte and the length of every range of ``box`` of a stored tensor in its file."""
    item = ITEM_SIZES[entry.dtype]
    for first, count in box.runs_in(Box.whole(entry.shape)):
        yield entry.offset + first * item, count * item


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    return prod(shape) * ITEM_SIZES[dtype]


def build(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, Header]:
    """Lay out a file for ``tensors`` (name -> dtype, shape): its first bytes, and the positions."""
    order = sorted(tensors, key=lambda name: (-ITEM_SIZES[tensors[name][0]], name))
    text: dict[str, Any] = {_METADATA: {"format": "pt", **(metadata or {})}}
    begins, end = {}, 0
    for name in order:
        if name == _METADATA:
            raise CheckpointError(
                f"a tensor cannot have the name {_METADATA!r}; safetensors reserves it"
            )
        dtype, shape = tensors[name]
        begins[name], end = end, end + num_bytes(dtype, shape)
        text[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begins[name], end]}
    try:
        body = json.dumps(text, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"a tensor's name is not valid Unicode: {error.object!r:.200}"
        ) from error
    if len(body) + ALIGNMENT > MAX_HEADER:
        raise CheckpointError(
            f"{len(tensors)} tensors need a header of {len(body)} bytes, more than the "
            f"{MAX_HEADER} that safetensors allows; choose a smaller max_shard_size"
        )
    start = -(-(8 + len(body)) // ALIGNMENT) * ALIGNMENT
    head = (start - 8).to_bytes(8, "little") + body.ljust(start - 8)
    entries = {n: TensorEntry(*tensors[n], start + begins[n]) for n in order}
    return head, Header(entries, text[_METADATA], start, start + end)


def header_length(first: bytes, file_size: int, where: str) -> int:
    """The header's length in the ``first`` 8 bytes, after a check that it is possible."""
    if len(first) < 8:
        raise CheckpointError(f"{where}: {file_size} bytes are too few for a safetensors file")
    length = int.from_bytes(first[:8], "little")
    if length > MAX_HEADER or 8 + length > file_size:
        raise CheckpointError(
            f"{where}: the header has {length} bytes according to the file, which has "
            f"{file_size}: it is truncated, damaged, or not a safetensors file"
        )
    return length


def parse(text: bytes, file_size: int, where: str) -> Header:
    """Parse a header (without its 8 length bytes); it must describe the file to the last byte."""
    if text[:1] != b"{":
        raise CheckpointError(
            f"{where}: the header does not start with '{{'; not a safetensors file"
        )
    raw = strict_json.parse_object(text, f"{where}: header")
    metadata = raw.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{where}: {_METADATA} must map names to text")
    start = 8 + len(text)
    entries = {
        name: _entry(value, start, f"{where}: tensor {name[:200]!r}") for name, value in raw.items()
    }
    end = start
    # By length, too: an empty tensor has the offset of the one behind it.
    for name, entry in sorted(
        entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes)
    ):
        if entry.offset != end:
            kind = "overlaps the one before" if entry.offset < end else "leaves a hole before it"
            raise CheckpointError(f"{where}: tensor {name[:200]!r} {kind}")
        end += entry.num_bytes
    if end != file_size:
        raise CheckpointError(
            f"{where}: the header describes {end} bytes, the file has {file_size}: "
            f"it is {'truncated' if end > file_size else 'followed by something else'}"
        )
    return Header(entries, metadata, start, file_size)


def _entry(value: Any, start: int, where: str) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: expected dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        supported = ", ".join(sorted(ITEM_SIZES))
        raise CheckpointError(f"{where}: unknown dtype {str(dtype)[:40]!r}; known are {supported}")
    begin, end = integers(offsets, 2, f"{where}: data_offsets")
    entry = TensorEntry(dtype, sizes(shape, f"{where}: shape"), start + begin)
    if end - begin != entry.num_bytes:
        raise CheckpointError(
            f"{where}: {end - begin} bytes, but {dtype} {list(entry.shape)} takes {entry.num_bytes}"
        )
    return entry


def integers(value: object, count: int | None, where: str) -> tuple[int, ...]:
    """``value`` as a tuple of ``count`` sizes: integers of 0 to 2^63 - 1, and none is a bool."""
    # torch has at most 64 dimensions.
    numbers = value if isinstance(value, list) and len(value) <= 64 else [None]
    if (count is not None and len(numbers) != count) or not all(map(is_size, numbers)):
        raise CheckpointError(f"{where}: expected sizes, found {reprlib.repr(value)}")
    return tuple(numbers)


def sizes(value: object, where: str) -> tuple[int, ...]:
    """``value`` as a shape whose elements can be counted, even without its empty dimensions."""
    shape = integers(value, None, where)
    if prod(max(n, 1) for n in shape) >= 1 << 60:
        raise CheckpointError(f"{where}: {reprlib.repr(value)} is larger than any memory")
    return shape


def is_size(value: object) -> bool:
    """Whether ``value`` is an integer of 0 to 2^63 - 1."""
    # type(), not isinstance(): JSON's true is an int of Python's.
    return type(value) is int and 0 <= value < 1 << 63


Tensors = Mapping[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape
Hashes = Mapping[str, Mapping[str, str]]  # of what was written: of each file, by tensor


@dataclass(frozen=True)
class FilePlan:
    """A planned safetensors file: its first bytes, and the position of every tensor after them."""

    name: str
    head: bytes
    header: Header


def plan_save(
    stem: str,
    tensors: Tensors,
    max_shard_size: int | None,
    *,
    apart: Collection[str] = (),
    boxes: Boxes | None = None,
) -> list[FilePlan]:
    """Files for ``tensors``: one, or several of at most ``max_shard_size`` bytes of tensors each.

    Tensors keep their order over the files, so that a layer stays together; a tensor that is larger
    than the limit has its own file. Those ``apart`` come first, in files of their own. ``boxes``
    gives the box of each tensor that is a part; every file's header then contains it.
    """
    aside = {name: described for name, described in tensors.items() if name in apart}
    rest = {name: described for name, described in tensors.items() if name not in apart}
    groups = [group for part in (aside, rest) if part for group in _groups(part, max_shard_size)]
    if len(groups) == 1:
        names = [f"{stem}.safetensors"]
    else:
        names = [
            f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)
        ]
    plans = []
    for name, group in zip(names, groups, strict=True):
        metadata = None if boxes is None else explain({key: boxes[key] for key in group})
        plans.append(FilePlan(name, *build(group, metadata)))
    return plans


def _groups(tensors: Tensors, limit: int | None) -> list[dict[str, tuple[str, tuple[int, ...]]]]:
    groups: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    filled = 0
    for name, (dtype, shape) in tensors.items():
        size = num_bytes(dtype, shape)
        if limit is not None and groups[-1] and filled + size > limit:
            groups.append({})
            filled = 0
        groups[-1][name] = (dtype, shape)
        filled += size
    return groups


VERSION_KEY, VERSION = "DCP_VERSION", "1.0"
INFO_KEY, START_KEY, SHAPE_KEY = "DCP_SHARDING_INFO", "saved_offsets", "shape"

Boxes = Mapping[str, tuple[tuple[int, ...], Box]]  # key -> the tensor's whole shape, the box of it


def explain(boxes: Boxes) -> dict[str, str]:
    """The header's metadata for a file that holds these boxes."""
    sharding_info = {
        key: {START_KEY: list(box.start), SHAPE_KEY: list(shape)}
        for key, (shape, box) in sorted(boxes.items())
    }
    return {VERSION_KEY: VERSION, INFO_KEY: json.dumps(sharding_info, separators=(",", ":"))}


def explained(header: Header) -> Boxes:
    """The boxes in a file, according to its header."""
    sharding_info = json.loads(header.metadata.get(INFO_KEY, "{}"))
    boxes = {}
    for key, entry in header.entries.items():
        start, shape = (0,) * len(entry.shape), entry.shape
        if key in sharding_info:
            start = tuple(sharding_info[key][START_KEY])
            shape = tuple(sharding_info[key][SHAPE_KEY])
        boxes[key] = shape, Box(start, entry.shape)
    return boxes
