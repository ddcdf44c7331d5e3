"""A tensor source whose tensors are pieces of ZeRO's flat buffers: read as plain bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from ..checkpoint.disk.bytes import raw
from ..checkpoint.sources.source import Shape
from ..errors import CheckpointError
from ..geometry.box import Box
from ..storage import files
from .archive import Values


@dataclass(frozen=True)
class ValueRange:
    """Consecutive values of a tensor in a file."""

    values: Values  # a flat buffer
    first: int  # the place of the first in the buffer
    count: int


@dataclass(frozen=True)
class Spread:
    """A tensor: its values in row-major order are those of the ranges, concatenated."""

    dtype: torch.dtype
    shape: Shape
    runs: tuple[ValueRange, ...]


def whole(values: Values) -> Spread:
    """A tensor in one place."""
    return Spread(values.dtype, values.shape, (ValueRange(values, 0, values.size),))


def cut(buffers: Sequence[Values], first: int, count: int) -> Iterator[ValueRange]:
    """``count`` values from the ``first`` on of concatenated buffers; fewer if these end."""
    bounds = [0, *accumulate(buffer.size for buffer in buffers)]
    for buffer, (start, stop) in zip(buffers, pairwise(bounds), strict=True):
        low, high = max(start, first), min(stop, first + count)
        if low < high:
            yield ValueRange(buffer, low - start, high - low)


@dataclass(frozen=True)
class FlatBufferSource:
    """Tensors in ranges."""

    tensors: Mapping[str, Spread]

    def shapes(self) -> Mapping[str, Shape]:
        """Their full shapes."""
        return {name: spread.shape for name, spread in self.tensors.items()}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """As stored."""
        return {name: spread.dtype for name, spread in self.tensors.items()}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Only the bytes of ``box``."""
        spread = self.tensors[name]
        found = torch.empty(box.shape, dtype=spread.dtype)
        view, done = raw(found), 0
        with files.raising(CheckpointError):
            for first, count in box.runs_in(Box.whole(spread.shape)):
                size = count * spread.dtype.itemsize
                _fill(view[done : done + size], spread, first)
                done += size
        return found


def _fill(view: memoryview, spread: Spread, first: int) -> None:
    item = spread.dtype.itemsize
    bounds = [0, *accumulate(run.count for run in spread.runs)]
    at = bisect_right(bounds, first) - 1
    while view:
        run, inside = spread.runs[at], first - bounds[at]
        size = min(len(view), (run.count - inside) * item)
        run.values.file.read_into(run.values.offset + (run.first + inside) * item, view[:size])
        view, first, at = view[size:], bounds[at + 1], at + 1
