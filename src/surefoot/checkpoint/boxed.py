"""Which box of a tensor this process holds, and whether it is the one to write it.

Boxes are computed from the cuts, by the rule of ``torch.chunk`` (pieces of the rounded-up size,
then a shorter one, then empty ones), not from torch's own offsets: these are wrong for some uneven
cuts.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..errors import CheckpointError
from .box import Box


@dataclass(frozen=True)
class Part:
    """What is here of one tensor."""

    values: torch.Tensor  # of the box; shares memory with the tensor
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    is_mine: bool  # whether this process writes it: of equal boxes, one is written


def part(name: str, tensor: torch.Tensor, *, is_main: bool = True) -> Part:
    """What this process holds of ``tensor``. A plain tensor is whole in every process, and written
    by the main one. Raises ``CheckpointError`` for a kind of cut that is not known here."""
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return Part(tensor, shape, Box.whole(shape), is_main)
    shape, mesh = tuple(tensor.shape), tensor.device_mesh
    coordinates = mesh.get_coordinate() or [0] * mesh.ndim
    start, extent, copies, copy = [0] * len(shape), list(shape), 1, 0
    for axis, placement in enumerate(tensor.placements):
        size, here = mesh.size(axis), coordinates[axis]
        if isinstance(placement, Replicate):
            copies, copy = copies * size, copy * size + here
        elif type(placement) is Shard:
            dim = placement.dim
            first, length = chunk(extent[dim], size, here)
            start[dim], extent[dim] = start[dim] + first, length
        else:
            raise CheckpointError(f"{name}: cannot store a tensor that is cut as {placement}")
    values = tensor.to_local()
    box = Box(tuple(start), tuple(extent))
    if tuple(values.shape) != box.shape:
        raise CheckpointError(
            f"{name}: this process holds {list(values.shape)}, expected {list(box.shape)} of "
            f"{list(shape)}"
        )
    is_first = not any(coordinates)
    chosen = zlib.crc32(name.encode()) % copies == copy  # spread evenly over the copies
    return Part(values, shape, box, chosen and box.size > 0 if Box.whole(shape).size else is_first)


def chunk(length: int, count: int, index: int) -> tuple[int, int]:
    """First element and number of elements of piece ``index`` of ``count``, as ``torch.chunk``."""
    size = -(-length // count)
    first = min(index * size, length)
    return first, min(size, length - first)
