"""What needs whole matrices: gradients projected to a low rank, with Adam's moments of them, and
matrices that are orthogonalized by Newton-Schulz iterations, as torch.optim.Muon does.

Full matrices that are sharded are computed each on one rank, its owner. It gets the parts of the
other ranks, and sends each its part of the result. All matrices travel in two exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...batch import sent
from ..state_tensor import ParameterKind, projector_shape, small_dim
from .rule_optimizer import Update
from .sharded import buckets, complete, part_of, size_of_part


def project(update: Update, projector: torch.Tensor) -> torch.Tensor:
    """The gradient in low rank, from this rank's part of the ``projector``."""
    shape = tuple(update.parameter.shape)
    is_right = shape[-2] >= shape[-1]
    grad = update.grad
    low = grad @ projector.mT if is_right else projector.mT @ grad
    return update.add_over_shards(low, {small_dim(shape)})


def project_back(low: torch.Tensor, projector: torch.Tensor, update: Update) -> torch.Tensor:
    """This rank's part of a matrix from its form in low rank."""
    shape = update.parameter.shape
    return low @ projector if shape[-2] >= shape[-1] else projector @ low


def random_projector(parameter: torch.Tensor, rank: int, seed: int) -> torch.Tensor:
    """This rank's part of a projector with normal entries of variance 1/rank; one for all experts.
    The CPU draws it, so that it is the same for every device and mesh."""
    *batch, m, n = parameter.shape
    drawn = torch.Generator().manual_seed(seed)
    full_shape = projector_shape((*[1] * len(batch), m, n), rank)
    full = torch.randn(full_shape, generator=drawn) / min(rank, m, n) ** 0.5
    full = sent(full.to(parameter.dtype), parameter.device)
    return part_of(full, parameter, {small_dim(tuple(parameter.shape))})


def singular_vectors(update: Update, rank: int) -> torch.Tensor:
    """This rank's part of a projector of the gradient's first singular vectors."""
    parameter = update.parameter
    full = complete(update.grad, parameter)
    is_narrow = full.dtype.itemsize < 4
    # torch decomposes no matrix in 16 bits.
    left, _, right = torch.linalg.svd(full.float() if is_narrow else full, full_matrices=False)
    is_right = parameter.shape[-2] >= parameter.shape[-1]
    vectors = right[..., :rank, :] if is_right else left[..., :rank]
    sharded_dims = {*range(parameter.ndim - 2), small_dim(tuple(parameter.shape))}
    return part_of(vectors.contiguous(), parameter, sharded_dims)


def adam_direction(
    update: Update, low: torch.Tensor, beta1: float, beta2: float, epsilon: float
) -> torch.Tensor:
    """Adam's direction of ``low``, without bias correction."""
    mean, square = update.tensor("low_rank_avg"), update.tensor("low_rank_avg_sq")
    mean.lerp_(low, 1 - beta1)
    square.mul_(beta2).addcmul_(low, low, value=1 - beta2)
    return mean / square.sqrt().add_(epsilon)


def corrected_rate(update: Update, beta1: float, beta2: float) -> float:
    """The learning rate with Adam's bias correction."""
    correction: float = (1 - beta2**update.number) ** 0.5 / (1 - beta1**update.number)
    return update.rate * correction


NS_DTYPE = torch.bfloat16  # of the iteration, as in torch.optim.Muon


def ns_dtype() -> torch.dtype:
    """The type of the iteration, in which a sharded matrix is gathered."""
    return NS_DTYPE


def orthogonalized(
    full: torch.Tensor, kind: ParameterKind, steps: int, scale: Callable[[int, int], float]
) -> torch.Tensor:
    """The matrices of a parameter, each orthogonalized and multiplied by its ``scale`` of outputs
    and inputs."""
    by_outputs = full.mT if kind.is_transposed else full  # (experts,) outputs, inputs
    wide = torch.promote_types(NS_DTYPE, torch.float32)
    scaled = torch.empty_like(by_outputs, dtype=wide)
    for matrix, into in zip(kind.matrices(by_outputs), kind.matrices(scaled), strict=True):
        orthogonal = newton_schulz(matrix.flatten(-3, -2), steps)
        factor = scale(orthogonal.shape[-2], orthogonal.shape[-1])
        into.copy_(torch.unflatten(orthogonal, -2, (kind.num_groups, -1))).mul_(factor)
    return scaled.mT if kind.is_transposed else scaled


def cost(shape: Sequence[int]) -> float:
    """What a parameter of this shape costs, as products of numbers."""
    *batch, m, n = shape
    return prod(batch) * float(min(m, n)) ** 2 * max(m, n)


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
    # By the Frobenius norm, which no singular value exceeds: the
    # iteration needs them to be 1 at most.
    x = torch.div(x, torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7))
    product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        # a x + (b g + c g g) x with g = x x', of the shorter side, in two
        # calls that add as they multiply.
        x = product(x, product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


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
    results: dict[int, torch.Tensor] = {}
    shared: dict[tuple[DeviceMesh, int, torch.dtype], list[int]] = {}
    for number, parameter in enumerate(parameters):
        axis = _only_axis(parameter)
        if axis is None:
            full_result = compute(number, complete(parts[number], parameter))
            results[number] = part_of(full_result.to(parameter.dtype), parameter)
        elif _dim(parameter, axis) < parameter.ndim - 2:  # every rank has full matrices
            results[number] = compute(number, parts[number]).to(parameter.dtype)
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
        results |= _exchanged(matrices, (mesh, axis), dtype, compute)
    return [results[number] for number in range(len(parts))]


def batches(updates: Sequence[Update]) -> Iterator[list[Update]]:
    """The updates whose matrices are exchanged together; the same on every rank."""
    return buckets(updates, lambda update: size_of_part(update.parameter), BATCH)


def balanced(costs: Sequence[float], size: int) -> list[int]:
    """The owner of each matrix: the most expensive first, each to the rank that has least to do."""
    loads, owners = [0.0] * size, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda each: -costs[each]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += costs[number]
    return owners


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
        result = compute(matrix.number, full).to(dtype).movedim(matrix.dim, 0)
        for answer, part in zip(answers, torch.split(result, extents[nth]), strict=True):
            answer.append(part)
    shapes = [[(m.extents(size)[rank], *m.rest) for m in each] for each in owned]
    empty = matrices[0].part.new_empty(0, dtype=dtype)
    result_parts = _all_to_all(answers, shapes, empty, group)
    return {
        m.number: part.movedim(0, m.dim)
        for each, parts in zip(owned, result_parts, strict=True)
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
    tensors = []
    for buffer, lengths, of_rank in zip(torch.split(received, counts), sizes, shapes, strict=True):
        parts = torch.split(buffer, lengths)
        tensors.append([part.view(shape) for part, shape in zip(parts, of_rank, strict=True)])
    return tensors
