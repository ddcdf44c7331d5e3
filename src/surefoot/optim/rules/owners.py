"""Compute something of full matrices that are sharded: each on one rank, its owner. It gets the
parts of the other ranks, and sends each its part of the result. All matrices travel in two
exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from .sharded import complete, part_of

Compute = Callable[[int, torch.Tensor], torch.Tensor]  # of a matrix, by its number
BATCH = 1 << 25  # elements of this rank's parts that are exchanged at once


@dataclass(frozen=True)
class _Matrix:
    """This rank's part of a matrix."""

    number: int
    part: torch.Tensor
    dim: int  # that is sharded
    length: int  # of this dimension in all
    owner: int

    @property
    def rest(self) -> tuple[int, ...]:
        """The other dimensions."""
        return (*self.part.shape[: self.dim], *self.part.shape[self.dim + 1 :])

    def extents(self, size: int) -> list[int]:
        """What each of ``size`` ranks has of the sharded dimension."""
        each = -(-self.length // size)
        return [max(0, min(each, self.length - rank * each)) for rank in range(size)]


def on_owners(
    parts: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    costs: Sequence[float],
    compute: Compute,
) -> list[torch.Tensor]:
    """This rank's parts of what ``compute`` makes of the full matrices of which every rank has
    ``parts``, sharded as ``parameters`` are. Those that are sharded along two axes of the mesh are
    computed by every rank; of experts, the matrices that a rank has."""
    made: dict[int, torch.Tensor] = {}
    shared: dict[tuple[DeviceMesh, int, torch.dtype], list[int]] = {}
    for number, parameter in enumerate(parameters):
        axis = _only_axis(parameter)
        if axis is None:
            found = compute(number, complete(parts[number], parameter))
            made[number] = part_of(found.to(parameter.dtype), parameter)
        elif _dim(parameter, axis) < parameter.ndim - 2:  # every rank has full matrices
            made[number] = compute(number, parts[number]).to(parameter.dtype)
        else:
            assert isinstance(parameter, DTensor)
            shared.setdefault((parameter.device_mesh, axis, parameter.dtype), []).append(number)
    for (mesh, axis, dtype), numbers in shared.items():
        owners = balanced([costs[number] for number in numbers], mesh.size(axis))
        matrices = []
        for number, owner in zip(numbers, owners, strict=True):
            dim = _dim(parameters[number], axis)
            length = parameters[number].shape[dim]
            matrices.append(_Matrix(number, parts[number], dim, length, owner))
        made |= _exchanged(matrices, (mesh, axis), dtype, compute)
    return [made[number] for number in range(len(parts))]


def balanced(costs: Sequence[float], size: int) -> list[int]:
    """The owner of each matrix: the most expensive first, each to the rank that has least to do."""
    loads, owners = [0.0] * size, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda each: -costs[each]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += costs[number]
    return owners


def batches(parameters: Sequence[torch.Tensor]) -> Iterator[range]:
    """Numbers of parameters, in order, with ``BATCH`` elements of a rank at most, or one; the same
    on every rank."""
    start, room = 0, BATCH
    for number, parameter in enumerate(parameters):
        size = size_of_part(parameter)
        if number > start and size > room:
            yield range(start, number)
            start, room = number, BATCH
        room -= size
    if start < len(parameters):
        yield range(start, len(parameters))


def size_of_part(parameter: torch.Tensor) -> int:
    """The elements of the largest part that a rank has; the same on every rank."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    mesh, placements = parameter.device_mesh, parameter.placements
    axes = [axis for axis, how in enumerate(placements) if not isinstance(how, Replicate)]
    return -(-parameter.numel() // prod(mesh.size(axis) for axis in axes))


def _only_axis(parameter: torch.Tensor) -> int | None:
    """The axis of the mesh that shards the parameter; None if it is none, or several."""
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    axes = [
        axis
        for axis, how in enumerate(parameter.placements)
        if not isinstance(how, Replicate) and mesh.size(axis) > 1
    ]
    is_plain = len(axes) == 1 and type(parameter.placements[axes[0]]) is Shard
    return axes[0] if is_plain else None


def _dim(parameter: torch.Tensor, axis: int) -> int:
    assert isinstance(parameter, DTensor)
    placed = parameter.placements[axis]
    assert isinstance(placed, Shard)
    return placed.dim


def _exchanged(
    matrices: Sequence[_Matrix],
    place: tuple[DeviceMesh, int],
    dtype: torch.dtype,
    compute: Compute,
) -> dict[int, torch.Tensor]:
    """This rank's parts, of ``dtype``, of what the owners make, by number."""
    mesh, axis = place
    size, rank, group = mesh.size(axis), mesh.get_local_rank(axis), mesh.get_group(axis)
    owned = [[m for m in matrices if m.owner == owner] for owner in range(size)]
    extents = [m.extents(size) for m in owned[rank]]
    shapes = [
        [(extent[other], *m.rest) for m, extent in zip(owned[rank], extents, strict=True)]
        for other in range(size)
    ]
    sent = [[m.part.movedim(m.dim, 0) for m in each] for each in owned]
    received = _all_to_all(sent, shapes, matrices[0].part.new_empty(0), group)
    answers: list[list[torch.Tensor]] = [[] for _ in range(size)]
    for nth, matrix in enumerate(owned[rank]):
        full = torch.cat([each[nth] for each in received]).movedim(0, matrix.dim)
        found = compute(matrix.number, full).to(dtype).movedim(matrix.dim, 0)
        for answer, part in zip(answers, torch.split(found, extents[nth]), strict=True):
            answer.append(part)
    shapes = [[(m.extents(size)[rank], *m.rest) for m in each] for each in owned]
    empty = matrices[0].part.new_empty(0, dtype=dtype)
    own = _all_to_all(answers, shapes, empty, group)
    return {
        m.number: part.movedim(0, m.dim)
        for each, parts in zip(owned, own, strict=True)
        for m, part in zip(each, parts, strict=True)
    }


def _all_to_all(
    sent: Sequence[Sequence[torch.Tensor]],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    empty: torch.Tensor,
    group: dist.ProcessGroup,
) -> list[list[torch.Tensor]]:
    """Send each rank its tensors; those of ``shapes`` come from each. ``empty`` has their type."""
    flat = torch.cat([empty, *(tensor.reshape(-1) for each in sent for tensor in each)])
    sizes = [[prod(shape) for shape in each] for each in shapes]
    counts = [sum(each) for each in sizes]
    received = empty.new_empty(sum(counts))
    outgoing = [sum(tensor.numel() for tensor in each) for each in sent]
    dist.all_to_all_single(received, flat, counts, outgoing, group=group)
    return [
        [part.view(shape) for part, shape in zip(torch.split(found, each), own, strict=True)]
        for found, each, own in zip(torch.split(received, counts), sizes, shapes, strict=True)
    ]
