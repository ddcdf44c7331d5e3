"""Matrices that are orthogonalized by Newton-Schulz iterations, as torch.optim.Muon does, each by
one rank.

An iteration needs a full matrix. Of sharded matrices each has an owner (``on_owners``): it gets the
parts of the other ranks, computes, and sends each rank its part of the result. All matrices of a
batch travel in two exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...parallel.progress import wait_for_ranks
from ..state_tensor import ParameterKind
from .rule_optimizer import Update
from .sharded import buckets, complete, part_of, size_of_part

NS_DTYPE = torch.bfloat16  # of the iteration, as in torch.optim.Muon, and of what is exchanged
BATCH = 1 << 25  # elements of this rank's parts that are exchanged at once
Compute = Callable[[int, torch.Tensor], torch.Tensor]  # of a matrix, by its number


def orthogonalized(
    full: torch.Tensor, kind: ParameterKind, steps: int, scale: Callable[[int, int], float]
) -> torch.Tensor:
    """The matrices of a parameter, each orthogonalized and multiplied by its ``scale`` of outputs
    and inputs."""
    by_outputs = full.mT if kind.is_transposed else full  # (experts,) outputs, inputs
    scaled = torch.empty_like(by_outputs, dtype=torch.promote_types(NS_DTYPE, torch.float32))
    for matrix, result in zip(kind.matrices(by_outputs), kind.matrices(scaled), strict=True):
        orthogonal = newton_schulz(matrix.flatten(-3, -2), steps)
        factor = scale(orthogonal.shape[-2], orthogonal.shape[-1])
        result.copy_(torch.unflatten(orthogonal, -2, (kind.num_groups, -1))).mul_(factor)
    return scaled.mT if kind.is_transposed else scaled


def newton_schulz(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """The nearest semi-orthogonal matrix, roughly: singular values end between 0.7 and 1.2. A
    leading dimension is a batch."""
    # Keller Jordan's quintic (https://kellerjordan.github.io/posts/muon/): as steep at 0 as can be,
    # so that small singular values grow within five iterations; they end around 1, not at it.
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x: torch.Tensor = matrix.to(NS_DTYPE)
    if is_tall:
        x = x.mT
    # By the Frobenius norm, which no singular value exceeds: the iteration needs them to be 1 at
    # most.
    x = torch.div(x, torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7))
    product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        # a x + (b g + c g g) x with g = x x', of the shorter side, in two calls that add as they
        # multiply.
        x = product(x, product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def batches(updates: Sequence[Update]) -> Iterator[list[Update]]:
    """The updates whose matrices are exchanged together; the same on every rank."""
    return buckets(updates, lambda update: size_of_part(update.parameter), BATCH)


def on_owners(
    parts: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], compute: Compute
) -> list[torch.Tensor]:
    """This rank's parts of what ``compute`` makes of the full matrices of which every rank has
    ``parts``, sharded as ``parameters`` are. Those that are sharded along two axes of the mesh are
    computed by every rank; of experts, the matrices that a rank has."""
    results: dict[int, torch.Tensor] = {}
    to_exchange: dict[tuple[DeviceMesh, int, torch.dtype], list[tuple[int, int]]] = {}
    for number, parameter in enumerate(parameters):
        shard = _single_shard(parameter)
        if shard is None:
            full_result = compute(number, complete(parts[number], parameter))
            results[number] = part_of(full_result.to(parameter.dtype), parameter)
            continue
        mesh, axis, dim = shard
        if dim < parameter.ndim - 2:  # every rank has full matrices
            results[number] = compute(number, parts[number]).to(parameter.dtype)
        else:
            to_exchange.setdefault((mesh, axis, parameter.dtype), []).append((number, dim))
    for (mesh, axis, dtype), sharded in to_exchange.items():
        size = mesh.size(axis)
        owners = balanced([_cost(parameters[number].shape) for number, _ in sharded], size)
        matrices = []
        for (number, dim), owner in zip(sharded, owners, strict=True):
            extents = _extents(parameters[number].shape[dim], size)
            rows = parts[number].movedim(dim, 0)
            matrices.append(_Matrix(number, rows, dim, extents, owner))
        results |= _exchanged(matrices, (mesh, axis), dtype, compute)
    return [results[number] for number in range(len(parts))]


def _single_shard(parameter: torch.Tensor) -> tuple[DeviceMesh, int, int] | None:
    """The mesh, its axis and the dimension along which a parameter is sharded; None if it is along
    no axis, or along several."""
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    axes = [
        axis
        for axis, placement in enumerate(parameter.placements)
        if not isinstance(placement, Replicate) and mesh.size(axis) > 1
    ]
    placement = parameter.placements[axes[0]] if len(axes) == 1 else None
    # FSDP beside tensor parallelism has ``_StridedShard``, whose parts are not in order
    return (mesh, axes[0], placement.dim) if type(placement) is Shard else None


def balanced(costs: Sequence[float], size: int) -> list[int]:
    """The owner of each matrix: the most expensive first, each to the rank that has least to do."""
    loads, owners = [0.0] * size, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += costs[number]
    return owners


def _cost(shape: Sequence[int]) -> float:
    """What an iteration of a parameter of this shape costs, as products of numbers."""
    *experts, m, n = shape
    return prod(experts) * float(min(m, n)) ** 2 * max(m, n)


def _extents(length: int, size: int) -> list[int]:
    """What each of ``size`` ranks has of a dimension of this length, as torch shards it."""
    most = -(-length // size)
    return [max(0, min(most, length - rank * most)) for rank in range(size)]


@dataclass(frozen=True)
class _Matrix:
    """A matrix that is sharded along ``dim``."""

    number: int
    rows: torch.Tensor  # this rank's part, with ``dim`` in front
    dim: int
    extents: Sequence[int]  # what each rank has of ``dim``
    owner: int

    def shape_on(self, rank: int) -> tuple[int, ...]:
        """Of the part of a rank, with ``dim`` in front."""
        return (self.extents[rank], *self.rows.shape[1:])


def _exchanged(
    matrices: Sequence[_Matrix],
    place: tuple[DeviceMesh, int],
    dtype: torch.dtype,
    compute: Compute,
) -> dict[int, torch.Tensor]:
    """This rank's parts, of ``dtype``, of what the owners make, by number."""
    mesh, axis = place
    size, rank, group = mesh.size(axis), mesh.get_local_rank(axis), mesh.get_group(axis)
    by_owner = [[m for m in matrices if m.owner == owner] for owner in range(size)]
    owned = by_owner[rank]

    # Each rank sends its parts to the owners ...
    parts = [[m.rows for m in of_owner] for of_owner in by_owner]
    shapes = [[m.shape_on(sender) for m in owned] for sender in range(size)]
    received = _all_to_all(parts, shapes, matrices[0].rows.new_empty(0), group)

    # ... which compute, and send each rank its parts of the results.
    results: list[list[torch.Tensor]] = [[] for _ in range(size)]  # by rank
    for index, matrix in enumerate(owned):
        full = torch.cat([of_sender[index] for of_sender in received]).movedim(0, matrix.dim)
        result = compute(matrix.number, full).to(dtype).movedim(matrix.dim, 0)
        for of_rank, part in zip(results, torch.split(result, [*matrix.extents]), strict=True):
            of_rank.append(part)
    shapes = [[m.shape_on(rank) for m in of_owner] for of_owner in by_owner]
    empty = matrices[0].rows.new_empty(0, dtype=dtype)
    returned = _all_to_all(results, shapes, empty, group)
    return {
        m.number: part.movedim(0, m.dim)
        for of_owner, result_parts in zip(by_owner, returned, strict=True)
        for m, part in zip(of_owner, result_parts, strict=True)
    }


def _all_to_all(
    tensors: Sequence[Sequence[torch.Tensor]],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    empty: torch.Tensor,
    group: dist.ProcessGroup,
) -> list[list[torch.Tensor]]:
    """Send each rank its ``tensors``, and receive from each those of its ``shapes``. ``empty`` has
    their type and device."""
    sizes = [[prod(shape) for shape in of_sender] for of_sender in shapes]
    input_splits = [sum(tensor.numel() for tensor in of_rank) for of_rank in tensors]
    output_splits = [sum(of_sender) for of_sender in sizes]
    flat = torch.cat([empty, *(tensor.reshape(-1) for of_rank in tensors for tensor in of_rank)])
    received = empty.new_empty(sum(output_splits))
    splits = (output_splits, input_splits)
    wait_for_ranks(dist.all_to_all_single, received, flat, *splits, group=group)
    buffers = torch.split(received, output_splits)
    parts = [torch.split(buffer, size) for buffer, size in zip(buffers, sizes, strict=True)]
    return [
        [part.view(shape) for part, shape in zip(of_sender, shapes_of_sender, strict=True)]
        for of_sender, shapes_of_sender in zip(parts, shapes, strict=True)
    ]
