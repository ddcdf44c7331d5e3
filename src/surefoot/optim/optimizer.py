"""The ``Optimizer`` protocol: settings, a torch optimizer, and a declaration of its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Protocol

from ..parallel.sharding import AxisShard, Cuts
from .parameter_kind import ParameterKind

if TYPE_CHECKING:
    import torch

    from .groups import Named
    from .parameter_kind import ParameterKinds
    from .schedules import Schedule

Shape = tuple[int, ...]


class Optimizer(Protocol):
    """One optimizer. Its fields are its settings in the recipe, those of ``LearningRate`` first."""

    @property
    def learning_rate(self) -> float:
        """Peak learning rate."""

    @property
    def learning_rates(self) -> Mapping[str, float]:
        """Factors of the learning rate, by a part of parameters' names."""

    @property
    def bf16_weights(self) -> str:
        """How bfloat16 weights are updated; see ``bf16_weights.py``."""

    @property
    def is_entrywise(self) -> bool:
        """Whether the update of an entry depends on nothing but its own gradients and state, so
        that some entries of a matrix can be trained without the others."""

    @property
    def state_tensors(self) -> Mapping[str, StateTensor]:
        """Each tensor that it may keep for a parameter, by its key in torch's state."""

    def build(self, named: Named, layouts: ParameterKinds) -> torch.optim.Optimizer:
        """The torch optimizer of ``named`` parameters; each group also has their ``names``.
        ``layouts`` says what each of them is in its model."""

    def schedule_over(self, total_steps: int) -> Schedule:
        """The learning-rate schedule of a run of ``total_steps``."""

    def trainer_arguments(self) -> dict[str, object]:
        """Its settings as ``TrainingArguments`` of transformers, without the learning rate."""


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


def declared_state(optim: Optimizer, shape: Shape, layout: ParameterKind) -> dict[str, StateTensor]:
    """The tensors of the state of a parameter, by key."""
    known = optim.state_tensors.items()
    return {key: one for key, one in known if one.belongs_to(shape, layout)}


SIDE = 4096  # of the matrix in the reference
_SIZES = {"": 4, "float32": 4, "bfloat16": 2, "uint8": 1}


def bytes_per_element(optim: Optimizer, *, is_matrix: bool) -> tuple[float, list[str]]:
    """The bytes of state of an element of a large matrix that is updated in float32, and the keys
    of the tensors that are not scalars."""
    shape, size = (SIDE, SIDE), 0
    declared = declared_state(optim, shape, ParameterKind(is_matrix))
    found = {key: one for key, one in declared.items() if one.shape(shape)}
    for one in found.values():
        size += prod(one.shape(shape)) * _SIZES[one.dtype]
    return size / SIDE**2, list(found)


def can_shard(optim: Optimizer, dim: int) -> bool:
    """Whether the state of matrices can be sharded along ``dim``."""
    shape, cut = (SIDE, SIDE), (AxisShard("any", dim),)
    known = declared_state(optim, shape, ParameterKind(is_matrix=True)).values()
    return all(one.cuts is not None and one.cuts(shape, cut) is not None for one in known)


def kept_dims(declared: StateTensor, shape: Shape) -> set[int]:
    """The dimensions along which a state tensor is sharded as its parameter is."""
    assert declared.cuts is not None
    found = (declared.cuts(shape, (AxisShard("any", dim),)) for dim in range(len(shape)))
    return {cut.dim for cuts in found if isinstance(cuts, tuple) for cut in cuts}


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
