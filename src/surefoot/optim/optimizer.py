"""``Optimizer``: the settings that all have, the torch optimizer that they make, and its state as
it is declared."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, ClassVar, Literal

from ..parallel.sharding import AxisShard
from ..schema import must
from .groups import Group, Named, parameter_groups
from .parameter_kind import ParameterKind, ParameterKinds, check_kinds, layout_of
from .rules import modules as rules
from .schedules import Schedule, ScheduleName
from .state_tensor import Shape, StateTensor

if TYPE_CHECKING:
    import torch

    from .rules.rule_optimizer import Points, Update


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """One optimizer: what differs from here. Its fields are its settings in the recipe. It says how
    one parameter is updated (``update``), and what it keeps for it (``state_tensors``)."""

    # whether the update of an entry depends on nothing but its own gradients and state, so that
    # some entries of a matrix can be trained without the others
    is_entrywise: ClassVar[bool] = False
    splits_matrices: ClassVar[bool] = False  # must know which matrices are fused in a parameter
    learning_rate: float = 5e-5
    """Peak learning rate."""
    learning_rates: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Factors of the learning rate for some parameters, by a part of their names:
    ``{embed_tokens: 0.1}``, ``{lora_B: 16}`` (LoRA+, arXiv:2402.12354), ``{layers.0: 0.5}``,
    ``{'*norm': 2}``. A pattern matches one or more parts of a name between its dots."""
    schedule: ScheduleName = "cosine"
    """Shape of the learning rate after warmup. ``wsd`` is warmup-stable-decay with a linear decay,
    ``wsd_cosine`` with a cosine. ``inverse_sqrt`` is 1 over the root of steps / warmup steps."""
    warmup_ratio: float = 0.0
    """Share of all steps used for warmup."""
    warmup_steps: int | None = None
    """Steps of warmup; has precedence over ``warmup_ratio``."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end, as a share of the peak (not for ``constant`` and
    ``inverse_sqrt``)."""
    decay_ratio: float = 0.1
    """``wsd`` and ``wsd_cosine``: share of all steps in the final decay."""
    bf16_weights: Literal["stochastic", "master", "nearest"] = "stochastic"
    """How bfloat16 weights (``model.dtype: bfloat16``) are updated. ``stochastic`` rounds each
    result up or down at random, so that updates are right in the mean. ``master`` updates a float32
    copy, which checkpoints contain. ``nearest`` rounds to the nearest value: updates below 0.2 % of
    a weight are lost."""
    offload_state: bool = False
    """Keep the state in main memory: for each update, that of some parameters at a time is copied
    to the GPU and back. Not for sharded parameters; without effect on a CPU."""
    weight_decay: float = 0.0
    """Decay of matrices per step, times the learning rate."""

    def __post_init__(self) -> None:
        must(self, "be positive", "learning_rate")
        for pattern, factor in self.learning_rates.items():
            if factor < 0:
                raise ValueError(f"learning_rates must not be negative, got {factor} for {pattern}")
        must(self, "be from 0 to 1", "warmup_ratio", "min_lr_ratio", "decay_ratio")
        must(self, "not be negative", "warmup_steps", "weight_decay")

    @property
    @abstractmethod
    def state_tensors(self) -> Mapping[str, StateTensor]:
        """Each tensor that it may keep for a parameter, by its key in torch's state."""

    def build(self, named: Named, layouts: ParameterKinds | None = None) -> torch.optim.Optimizer:
        """The torch optimizer of ``named`` parameters; each group also has their ``names``.
        ``layouts`` says what each of them is in its model."""
        known = layouts or {}
        groups = self.groups(named, known)
        check_kinds(self, known)
        return rules.rule_optimizer.RuleOptimizer(
            *(groups, self.update_all, self.state_tensors, known),
            learning_rate=self.learning_rate,
            points=self.points,
        )

    def groups(self, named: Named, layouts: ParameterKinds) -> list[Group]:
        """The groups of ``named`` parameters, by learning rate and decay."""
        return parameter_groups(
            named,
            lambda name, num_dims: self.rate_of(layout_of(name, num_dims, layouts)),
            self.learning_rates,
            self.weight_decay,
        )

    def rate_of(self, kind: ParameterKind) -> float:
        """The peak learning rate of parameters of a kind."""
        return self.learning_rate

    @property
    def points(self) -> Points | None:
        """Where gradients are computed, if not at the weights that checkpoints contain."""
        return None

    def update_all(self, updates: Sequence[Update]) -> None:
        """Update all parameters of a step."""
        for update in updates:
            self.update(update)

    def update(self, update: Update) -> None:
        """Update one parameter."""
        raise NotImplementedError

    def schedule_over(self, total_steps: int) -> Schedule:
        """The learning-rate schedule of a run of ``total_steps``."""
        warmup = self.warmup_steps
        if warmup is None:
            warmup = math.ceil(self.warmup_ratio * total_steps)
        return Schedule(
            name=self.schedule,
            total_steps=total_steps,
            warmup_steps=min(warmup, total_steps),
            min_ratio=self.min_lr_ratio,
            decay_steps=math.ceil(self.decay_ratio * total_steps),
        )


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
