"""The ``Optimizer`` protocol: settings, a torch optimizer, and a declaration of its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from ..geometry.sharding import AxisShard, Cuts

if TYPE_CHECKING:
    import torch

    from .groups import Named
    from .parameter_kind import ParameterKind, ParameterKinds
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
