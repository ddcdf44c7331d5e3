"""The ``Optimizer`` protocol: settings, a torch optimizer, and a declaration of its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..geometry.sharding import AxisShard, Cuts

if TYPE_CHECKING:
    import torch

    from .groups import Named
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

    def build(self, named: Named) -> torch.optim.Optimizer:
        """The torch optimizer of ``named`` parameters; each group also has their ``names``."""

    def schedule_over(self, total_steps: int) -> Schedule:
        """The learning-rate schedule of a run of ``total_steps``."""

    def trainer_arguments(self) -> dict[str, object]:
        """Its settings as ``TrainingArguments`` of transformers, without the learning rate."""


@dataclass(frozen=True)
class StateTensor:
    """Shape and sharding of one state tensor, as functions of those of its parameter. A tensor
    without dimensions is a plain one, equal on every rank. ``cuts`` is None if the optimizer does
    not support this tensor for a sharded parameter."""

    shape: Callable[[Shape], Shape]
    cuts: Callable[[Shape, tuple[AxisShard, ...]], Cuts] | None


LIKE_PARAMETER = StateTensor(lambda shape: shape, lambda _, cuts: cuts)
SCALAR = StateTensor(lambda _: (), lambda _, __: ())


def reduced(dim: int) -> StateTensor:
    """Like its parameter, but of size 1 along ``dim`` (negative), where it is not sharded."""

    def shape(parameter: Shape) -> Shape:
        at = len(parameter) + dim
        return (*parameter[:at], 1, *parameter[at + 1 :])

    def cuts(parameter: Shape, cuts: tuple[AxisShard, ...]) -> Cuts:
        return tuple(cut for cut in cuts if cut.dim != len(parameter) + dim)

    return StateTensor(shape, cuts)
