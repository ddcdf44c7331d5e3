"""Layout, in the snapshot buffer, of the parts of a file that this rank writes. Pure.

A complete file has the same layout as on the disk. If several ranks write a file, each has its
boxes. Boxes that are one range of the file have the same offset within a page as there, so that
they can be written without a copy, together with adjacent ones. The others, boxes of columns, are
written row by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from ...parallel.box import Box
from ...storage.files import PAGE
from ..disk.header import num_bytes, ranges_of
from ..saving.job import Shard

_ALIGNMENT = 64  # bytes, of a tensor in memory


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes that are contiguous in memory and in the file."""

    start: int  # in the image
    offset: int  # in the file
    length: int


@dataclass(frozen=True)
class FileImage:
    """The positions of everything in the image, which begins with the file's header."""

    spots: Mapping[str, tuple[int, int]]  # start and length of each tensor, or box of one, by key
    stretches: Sequence[ByteRange]  # what is written as it lies
    scattered: Mapping[str, Box]  # boxes that are not one range of the file
    size: int


def image_of(shard: Shard) -> FileImage:
    """The layout of the bytes of ``shard`` in memory."""
    header = shard.plan.header
    if shard.share is None:
        spots = {name: (entry.offset, entry.num_bytes) for name, entry in header.entries.items()}
        return FileImage(spots, [ByteRange(0, 0, header.file_size)], {}, header.file_size)
    end = header.data_start
    spots, scattered = {}, dict[str, Box]()
    stretches = [ByteRange(0, 0, end)] if shard.share.has_head else []
    for name, entry in header.entries.items():
        if (box := shard.share.boxes.get(name)) is None:
            continue
        length = num_bytes(entry.dtype, box.shape)
        runs = list(islice(ranges_of(entry, box), 2))
        if len(runs) == 1:
            start = _append(stretches, end, *runs[0])
        else:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            scattered |= {name: box} if runs else {}
        spots[name] = start, length
        end = start + length
    return FileImage(spots, stretches, scattered, end)


def _append(stretches: list[ByteRange], end: int, offset: int, length: int) -> int:
    """Add a byte range of the file; returns where in memory it begins."""
    if stretches:
        last = stretches[-1]
        if (last.start + last.length, last.offset + last.length) == (end, offset):
            stretches[-1] = ByteRange(last.start, last.offset, last.length + length)
            return end
    start = -(-end // PAGE) * PAGE + offset % PAGE
    stretches.append(ByteRange(start, offset, length))
    return start
