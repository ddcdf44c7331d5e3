"""Shapes and sharding of gradients that are projected to a low rank, and of Adam's moments of them.

The smaller dimension of a matrix is projected. Of an m x n gradient G with m >= n, the projector is
P_rn and the result G P' (m x r); otherwise P_mr and P' G (r x n). So the result is sharded along
the larger dimension as the parameter is, and ranks sum over shards of the smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..parallel.sharding import AxisShard
from .optimizer import LIKE_PARAMETER, SCALAR, Shape, StateTensor, of_matrices, of_others


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


def _along(shape: Callable[[Shape], Shape], dim_of: Callable[[Shape], int]) -> StateTensor:
    """A tensor of ``shape`` that keeps the shards of the batch and of one dimension."""

    def cuts(whole: Shape, found: tuple[AxisShard, ...]) -> tuple[AxisShard, ...]:
        kept = {*range(len(whole) - 2), dim_of(whole)}
        return tuple(cut for cut in found if cut.dim in kept)

    return of_matrices(StateTensor(shape, cuts))
