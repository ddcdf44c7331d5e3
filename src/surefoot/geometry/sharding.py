"""How a tensor is cut over processes: recorded when it is sharded, pure arithmetic ever after.

A cut divides what the cuts before it have left, by the rule of ``torch.chunk``: pieces of the
rounded-up size, then a shorter one, then empty ones. So which part of a tensor any process holds
follows from its cuts, in the order in which they were made, and from the process's place on the
mesh, without torch and without the other processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class AxisShard:
    """``dim`` of a tensor is divided among the processes along ``axis`` of the mesh."""

    axis: str
    dim: int


@dataclass(frozen=True)
class FusedSlice:
    """A tensor that is a part of a larger one, which is what has been cut. Leading dimensions of
    the larger one that it lacks, it has one of."""

    shape: tuple[int, ...]  # of the larger one
    start: tuple[int, ...]  # in it
    cuts: tuple[AxisShard, ...]


Cuts = tuple[AxisShard, ...] | FusedSlice  # in the order in which they were made


def axes(cuts: Cuts) -> set[str]:
    """The axes that cut a tensor."""
    return {cut.axis for cut in (cuts.cuts if isinstance(cuts, FusedSlice) else cuts)}


def chunk(length: int, count: int, index: int) -> tuple[int, int]:
    """First element and number of elements of piece ``index`` of ``count``, as ``torch.chunk``."""
    size = -(-length // count)
    first = min(index * size, length)
    return first, min(size, length - first)


def local_offset_and_shape(
    shape: Sequence[int], cuts: Cuts, sizes: Mapping[str, int], place: Mapping[str, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Start and shape of the part that one process holds; of a ``Window`` that lies elsewhere,
    nothing.

    Args:
        shape: of the whole tensor.
        cuts: what it went through.
        sizes: of the axes of the mesh, by name; one that is not there has size 1.
        place: of the process on each axis.
    """
    if isinstance(cuts, FusedSlice):
        return _seen(shape, cuts, *local_offset_and_shape(cuts.shape, cuts.cuts, sizes, place))
    start, extent = [0] * len(shape), list(shape)
    for cut in cuts:
        first, length = chunk(extent[cut.dim], sizes.get(cut.axis, 1), place.get(cut.axis, 0))
        start[cut.dim], extent[cut.dim] = start[cut.dim] + first, length
    return tuple(start), tuple(extent)


def _seen(
    shape: Sequence[int], window: FusedSlice, start: Sequence[int], extent: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What of the box of the larger tensor lies in the window, seen from there."""
    num_left_out = len(window.shape) - len(shape)
    sizes = (*[1] * num_left_out, *shape)
    first = [max(a, b) for a, b in zip(start, window.start, strict=True)]
    stops = [(a + n, b + m) for a, n, b, m in zip(start, extent, window.start, sizes, strict=True)]
    lengths = [min(stop) - a for stop, a in zip(stops, first, strict=True)]
    if any(length <= 0 for length in lengths):
        return (0,) * len(shape), (0,) * len(shape)
    inside = tuple(a - b for a, b in zip(first, window.start, strict=True))
    return inside[num_left_out:], tuple(lengths[num_left_out:])
