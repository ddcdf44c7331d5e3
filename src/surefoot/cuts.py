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
class Cut:
    """``dim`` of a tensor is divided among the processes along ``axis`` of the mesh."""

    axis: str
    dim: int


Cuts = tuple[Cut, ...]  # in the order in which they were made


def chunk(length: int, count: int, index: int) -> tuple[int, int]:
    """First element and number of elements of piece ``index`` of ``count``, as ``torch.chunk``."""
    size = -(-length // count)
    first = min(index * size, length)
    return first, min(size, length - first)


def held(
    shape: Sequence[int], cuts: Cuts, sizes: Mapping[str, int], place: Mapping[str, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Start and shape of the part that one process holds.

    Args:
        shape: of the whole tensor.
        cuts: what it went through.
        sizes: of the axes of the mesh, by name; one that is not there has size 1.
        place: of the process on each axis.
    """
    start, extent = [0] * len(shape), list(shape)
    for cut in cuts:
        first, length = chunk(extent[cut.dim], sizes.get(cut.axis, 1), place.get(cut.axis, 0))
        start[cut.dim], extent[cut.dim] = start[cut.dim] + first, length
    return tuple(start), tuple(extent)
