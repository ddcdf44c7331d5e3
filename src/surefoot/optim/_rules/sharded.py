"""Sharded parameters as update rules see them: this rank's part, sums over ranks, full matrices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from math import prod
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Replicate

from ...parallel.progress import wait_for_ranks

T = TypeVar("T")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def add_over_shards(
    values: torch.Tensor, parameter: torch.Tensor, dims: Collection[int]
) -> torch.Tensor:
    """``values``, summed in place over the ranks that have other parts of ``parameter`` along
    ``dims``."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis, placed in enumerate(parameter.placements):
            if _dim(placed) in dims and mesh.size(axis) > 1:
                wait_for_ranks(dist.all_reduce, values, group=mesh.get_group(axis))
    return values


def complete(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The full tensor of which every rank has ``values``, sharded as ``parameter`` is."""
    if not isinstance(parameter, DTensor):
        return values
    return sharded_as(parameter, values, parameter.shape).full_tensor()


def sharded_as(
    parameter: DTensor,
    values: torch.Tensor,
    shape: Sequence[int],
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """This rank's ``values`` as a tensor of ``shape`` on the mesh of ``parameter``, with its
    placements or others; without communication."""
    full = torch.empty(shape, device="meta")  # whose strides are those of the full tensor
    sharded: DTensor = DTensor.from_local(
        values,
        parameter.device_mesh,
        parameter.placements if placements is None else placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )
    return sharded


def part_of(
    full: torch.Tensor, parameter: torch.Tensor, dims: Collection[int] | None = None
) -> torch.Tensor:
    """This rank's part of ``full``, sharded as ``parameter`` is along ``dims``, or along all;
    without communication."""
    if not isinstance(parameter, DTensor):
        return full
    mesh = parameter.device_mesh
    replicated = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    sharded_dims = range(parameter.ndim) if dims is None else dims
    placements = [p if _dim(p) in sharded_dims else Replicate() for p in parameter.placements]
    return replicated.redistribute(placements=placements).to_local()


def zeros(
    shape: Sequence[int], dims: Collection[int], parameter: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Zeros of ``shape``, sharded along ``dims`` as ``parameter`` is."""
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=dtype, device=parameter.device)
    local_weights = parameter.to_local()
    extent = [local_weights.shape[d] if d in dims else size for d, size in enumerate(shape)]
    placements = [p if _dim(p) in dims else Replicate() for p in parameter.placements]
    local_zeros = torch.zeros(extent, dtype=dtype, device=local_weights.device)
    return sharded_as(parameter, local_zeros, shape, placements)


def _dim(placed: Placement) -> int | None:
    """The dimension that it shards; None if it replicates."""
    return None if isinstance(placed, Replicate) else getattr(placed, "dim", None)


def mean_over(values: torch.Tensor, parameter: torch.Tensor, dim: int) -> torch.Tensor:
    """The mean of ``values`` along ``dim``, which keeps size 1, over all parts of ``parameter``.
    ``values`` is sharded along this dimension as ``parameter`` is."""
    if dim < 0:  # of a scalar
        return values
    total = add_over_shards(values.sum(dim, keepdim=True), parameter, {dim})
    return total / parameter.shape[dim]


def mean_square(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The mean square of a tensor that is sharded as ``parameter`` is; a scalar."""
    total = values.float().square().sum() if values.dtype.itemsize < 4 else values.square().sum()
    return add_over_shards(total, parameter, range(parameter.ndim)) / max(1, parameter.numel())


def gathered_rows(rows: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """One number for each row of a matrix, of which every rank has those of its part."""
    return complete(rows, _column(parameter))


def own_rows(rows: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's of the numbers of all rows of a matrix."""
    return part_of(rows, _column(parameter))


def _column(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor with one column that is sharded as the rows of ``parameter`` are."""
    return zeros((parameter.shape[0], 1), {0}, parameter, parameter.dtype)


def size_of_part(parameter: torch.Tensor) -> int:
    """The elements of the largest part that a rank has; the same on every rank."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    mesh, placements = parameter.device_mesh, parameter.placements
    axes = [axis for axis, how in enumerate(placements) if not isinstance(how, Replicate)]
    return -(-parameter.numel() // prod(mesh.size(axis) for axis in axes))


def buckets(items: Sequence[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """``items`` in order, in groups of at most ``most`` elements, or of one item."""
    bucket: list[T] = []
    room = most
    for item in items:
        if bucket and size_of(item) > room:
            yield bucket
            bucket, room = [], most
        bucket.append(item)
        room -= size_of(item)
    if bucket:
        yield bucket
