"""What a parameter is in its model, and what an optimizer may keep for it: shape, type and sharding
of each tensor, declared.

Of gradients that are projected to a low rank: the smaller dimension of a matrix is projected. Of an
m x n gradient G with m >= n, the projector is P_rn and the result G P' (m x r); otherwise P_mr and
P' G (r x n). So the result is sharded along the larger dimension as the parameter is, and ranks sum
over shards of the smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import RecipeError
from ..parallel.sharding import AxisShard, Cuts

if TYPE_CHECKING:
    import torch


Shape = tuple[int, ...]


@dataclass(frozen=True)
class StateTensor:
    """Shape and sharding of one state tensor, as functions of those of its parameter. A tensor
    without dimensions is a plain one, equal on every rank. ``cuts`` is None if the optimizer does
    not support this tensor for a sharded parameter, and returns None where it does not for these
    shards."""

    shape: Callable[[Shape], Shape]
    cuts: Callable[[Shape, tuple[AxisShard, ...]], Cuts | None] | None
    dtype: str = ""  # empty: the type in which its parameter is updated
    belongs_to: Callable[[Shape, ParameterKind], bool] = lambda _, __: True


def kept_dims(declared: StateTensor, shape: Shape) -> set[int]:
    """The dimensions along which a state tensor is sharded as its parameter is."""
    assert declared.cuts is not None
    cuts_by_dim = (declared.cuts(shape, (AxisShard("any", dim),)) for dim in range(len(shape)))
    return {cut.dim for cuts in cuts_by_dim if isinstance(cuts, tuple) for cut in cuts}


LIKE_PARAMETER = StateTensor(lambda shape: shape, lambda _, cuts: cuts)
SCALAR = StateTensor(lambda _: (), lambda _, __: (), dtype="float32")


def of_matrices(declared: StateTensor) -> StateTensor:
    """The same, but only of matrices inside layers."""
    return replace(declared, belongs_to=lambda _, layout: layout.is_matrix)


def of_others(declared: StateTensor) -> StateTensor:
    """The same, but not of matrices inside layers."""
    return replace(declared, belongs_to=lambda _, layout: not layout.is_matrix)


def reduced(dim: int) -> StateTensor:
    """Like its parameter, but of size 1 along ``dim`` (negative), where it is not sharded. For
    a scalar, a scalar."""

    def shape(parameter: Shape) -> Shape:
        if not parameter:
            return ()
        at = len(parameter) + dim
        return (*parameter[:at], 1, *parameter[at + 1 :])

    def cuts(parameter: Shape, cuts: tuple[AxisShard, ...]) -> Cuts:
        return tuple(cut for cut in cuts if cut.dim != len(parameter) + dim)

    return StateTensor(shape, cuts)


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
        **{key: of_matrices(declaration) for key, declaration in more.items()},
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

    def cuts(whole: Shape, shards: tuple[AxisShard, ...]) -> tuple[AxisShard, ...]:
        sharded_dims = {*range(len(whole) - 2), dim_of(whole)}
        return tuple(cut for cut in shards if cut.dim in sharded_dims)

    return of_matrices(StateTensor(shape, cuts))


@dataclass(frozen=True)
class ParameterKind:
    """A matrix inside a layer, or all such matrices of a layer's experts; or anything else."""

    is_matrix: bool  # False: embeddings, head, norms, biases, routers, adapters
    parts: tuple[int, ...] = ()  # outputs of the matrices that are fused in it, in order
    head_size: int = 0  # outputs of an attention head, for queries and keys
    is_transposed: bool = False  # outputs are its last dimension, not the one before
    num_groups: int = 1  # of its outputs, each of which has its share of every part, in order
    is_unknown: bool = False  # queries, keys and values are fused in it, in an unknown order
    part: str = ""  # tower, projector or language, of a model that reads pictures

    def matrices(self, by_outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of its matrices, in groups of outputs: ``(experts,) groups, outputs, inputs``."""
        *experts, outputs, inputs = by_outputs.shape
        each = outputs // self.num_groups
        groups = by_outputs.view(*experts, self.num_groups, each, inputs)
        sizes = [size // self.num_groups for size in self.parts]
        views: tuple[torch.Tensor, ...] = groups.split(sizes or each, -2)  # type: ignore[no-untyped-call]
        return views


ParameterKinds = Mapping[str, ParameterKind]  # by the names of parameters in files
OTHER = ParameterKind(is_matrix=False)


def check_kinds(optim: object, kinds: ParameterKinds) -> None:
    """Raise ``RecipeError`` if ``optim`` must know what is fused in a parameter that is unknown."""
    for name, kind in kinds.items() if getattr(optim, "splits_matrices", False) else ():
        if kind.is_unknown:
            raise RecipeError(
                f"optim: {type(optim).__name__} updates queries, keys and values one by one; how "
                f"they are fused in {name} is not known of this architecture; use another optimizer"
            )


def layout_of(name: str, num_dims: int, layouts: ParameterKinds) -> ParameterKind:
    """The layout of the parameter ``name``. Without a model, whatever has rows is a matrix."""
    if layouts:
        return layouts.get(name, OTHER)
    return ParameterKind(is_matrix=num_dims >= 2)
