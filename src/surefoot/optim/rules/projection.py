"""Gradients projected to a low rank: the shapes, the sharding, and Adam's moments of them.

The smaller dimension of a matrix is projected. Of an m x n gradient G with m >= n, the projector is
P_rn and the result G P' (m x r); otherwise P_mr and P' G (r x n). So the result is sharded along
the larger dimension as the parameter is, and ranks sum over shards of the smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ...geometry.sharding import AxisShard
from ..optimizer import LIKE_PARAMETER, SCALAR, Shape, StateTensor, of_matrices, of_others
from .rule_optimizer import Update
from .sharded import add_over_shards, complete, part_of


def state_of_rank(rank: int, **more: StateTensor) -> Mapping[str, StateTensor]:
    """Adam's state with moments of ``rank`` for matrices; ``more`` is only of these."""

    def shape(whole: Shape) -> Shape:
        *batch, m, n = whole
        small = min(rank, m, n)
        return (*batch, m, small) if m >= n else (*batch, small, n)

    low = _along(shape, large_dim)
    return {
        "step": SCALAR,
        "exp_avg": of_others(LIKE_PARAMETER),
        "exp_avg_sq": of_others(LIKE_PARAMETER),
        "low_rank_avg": low,
        "low_rank_avg_sq": low,
        **{key: of_matrices(one) for key, one in more.items()},
    }


def projector_of_rank(rank: int) -> StateTensor:
    """The declaration of a projector that is saved."""
    return _along(lambda whole: projector_shape(whole, rank), small_dim)


def projector_shape(whole: Shape, rank: int) -> Shape:
    """``(r, n)`` or ``(m, r)``, and a batch before it as the parameter has."""
    *batch, m, n = whole
    small = min(rank, m, n)
    return (*batch, small, n) if m >= n else (*batch, m, small)


def large_dim(whole: Shape) -> int:
    """The dimension that is not projected."""
    return len(whole) - (2 if whole[-2] >= whole[-1] else 1)


def small_dim(whole: Shape) -> int:
    """The dimension that is projected."""
    return len(whole) - (1 if whole[-2] >= whole[-1] else 2)


def project(update: Update, projector: torch.Tensor) -> torch.Tensor:
    """The gradient in low rank, from this rank's part of the ``projector``."""
    shape = tuple(update.parameter.shape)
    is_right = shape[-2] >= shape[-1]
    grad = update.grad
    low = grad @ projector.mT if is_right else projector.mT @ grad
    return add_over_shards(low, update.parameter, {small_dim(shape)})


def project_back(low: torch.Tensor, projector: torch.Tensor, update: Update) -> torch.Tensor:
    """This rank's part of a matrix from its form in low rank."""
    shape = update.parameter.shape
    return low @ projector if shape[-2] >= shape[-1] else projector @ low


def random_projector(parameter: torch.Tensor, rank: int, seed: int) -> torch.Tensor:
    """This rank's part of a projector with normal entries of variance 1/rank; one for all experts.
    The CPU draws it, so that it is the same for every device and mesh."""
    *batch, m, n = parameter.shape
    drawn = torch.Generator().manual_seed(seed)
    made = projector_shape((*[1] * len(batch), m, n), rank)
    full = torch.randn(made, generator=drawn) / min(rank, m, n) ** 0.5
    full = full.to(parameter.device, parameter.dtype)
    return part_of(full, parameter, {small_dim(tuple(parameter.shape))})


def singular_vectors(update: Update, rank: int) -> torch.Tensor:
    """This rank's part of a projector of the gradient's first singular vectors."""
    own = update.parameter
    full = complete(update.grad, own)
    is_narrow = full.dtype.itemsize < 4
    left, _, right = torch.linalg.svd(full.float() if is_narrow else full, full_matrices=False)
    is_right = own.shape[-2] >= own.shape[-1]
    found = right[..., :rank, :] if is_right else left[..., :rank]
    kept = {*range(own.ndim - 2), small_dim(tuple(own.shape))}
    return part_of(found.contiguous(), own, kept)


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


def _along(shape: Callable[[Shape], Shape], dim_of: Callable[[Shape], int]) -> StateTensor:
    """A tensor of ``shape`` that keeps the shards of the batch and of one dimension."""

    def cuts(whole: Shape, found: tuple[AxisShard, ...]) -> tuple[AxisShard, ...]:
        kept = {*range(len(whole) - 2), dim_of(whole)}
        return tuple(cut for cut in found if cut.dim in kept)

    return of_matrices(StateTensor(shape, cuts))
