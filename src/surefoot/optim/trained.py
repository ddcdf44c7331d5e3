"""The optimizer of the currently trainable parameters, which may change from step to step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..errors import RecipeError
from ..geometry.sharding import Cuts
from .bf16_weights import BucketedOptimizer, build_optimizer
from .groups import check_learning_rates, log_learning_rates
from .learning_rate import offloads_state
from .optimizer import Optimizer
from .parameter_kind import ParameterKinds
from .state import NamedState, State, other_parameters
from .state_cuts import StateCuts

logger = logging.getLogger(__name__)
# Of these names, those of the parameters that update number `step` (from 0) changes.
Trainable = Callable[[int, Sequence[str]], Collection[str]]


def every_name(_step: int, names: Sequence[str]) -> Collection[str]:
    """All parameters, at every step."""
    return names


def unsupported_by_pipelines() -> RecipeError:
    """The error for a method that trains other parameters at other steps."""
    return RecipeError(
        "parallel.pp: the method changes its trainable parameters, which a pipeline "
        "does not support; leave pp at 1 and use parallel.dp_shard"
    )


@dataclass
class TrainedParameters:
    """The trainable parameters of one network and their optimizer, which is rebuilt whenever they
    change. Its state is the optimizer's, because the step determines the parameters."""

    optim: Optimizer
    named: Mapping[str, nn.Parameter]  # on this rank, all that may be trained, by names in files
    trainable: Trainable = every_name
    cuts: Mapping[str, Cuts] = field(default_factory=dict)  # of sharded ones
    names: Sequence[str] = ()  # of the whole model, if this rank has some layers of it
    layouts: ParameterKinds = field(default_factory=dict)  # what each is in its model
    optimizer: torch.optim.Optimizer = field(init=False)
    _active: frozenset[str] = field(init=False, default=frozenset())
    _is_unchecked: bool = field(init=False, default=False)  # a state was loaded, at which step?

    def __post_init__(self) -> None:
        self.names = self.names or tuple(self.named)
        check_learning_rates(self.optim.learning_rates, self.names)
        log_learning_rates(self.optim.learning_rate, self.optim.learning_rates, self.names)
        if offloads_state(self.optim) and all(each.is_cpu for each in self.named.values()):
            logger.info("optim.offload_state: no effect, as the weights are in main memory too")
        self._cuts = StateCuts(self.optim, self.named, self.cuts)
        self._cuts.check()
        self._become(self._names_at(0))

    def at(self, step: int) -> torch.optim.Optimizer:
        """The optimizer for update ``step``: a new one if other parameters are trainable."""
        self.check(step)
        names = self._names_at(step)
        if names != self._active:
            self._become(names)
        if isinstance(self.optimizer, BucketedOptimizer):
            self.optimizer.number = step
        return self.optimizer

    def check(self, step: int) -> None:
        """Raise ``CheckpointError`` if the loaded state cannot be that after ``step`` updates."""
        last = self._names_at(max(0, step - 1))
        if self._is_unchecked and self._active != last:
            raise other_parameters(self._active, last)
        self._is_unchecked = False

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """The live tensors of the currently trainable parameters."""
        return NamedState(self.optimizer).state_dict()

    def load_state_dict(self, state: State) -> None:
        """Restore ``state``; its parameters are then the trainable ones. Raises ``CheckpointError``
        if some of them do not belong to this network."""
        names = frozenset(state)
        if names - self.named.keys():
            raise other_parameters(names, self._active)
        if names and names != self._active:
            self._become(names)
        NamedState(self.optimizer).load_state_dict(state)
        self._is_unchecked = bool(names)

    def like(self, pointer: str) -> torch.Tensor | None:
        """A tensor of the state that does not exist yet, with its sharding."""
        return self._cuts.like(pointer)

    def cuts_of(self, pointer: str) -> Cuts | None:
        """The sharding of a tensor of the state."""
        return self._cuts.of(pointer)

    def is_copy(self, pointer: str) -> bool:
        """No other pipeline stage has it."""
        return False

    def _names_at(self, step: int) -> frozenset[str]:
        return frozenset(self.trainable(step, self.names)) & self.named.keys()

    def _become(self, names: frozenset[str]) -> None:
        """Make ``names`` trainable and freeze the others, whose state is freed, and all gradients.
        The state of parameters that remain trainable is kept: their training is not interrupted."""
        if len(self.names) > len(self.named) and names != self.named.keys():
            raise unsupported_by_pipelines()
        for name, parameter in self.named.items():
            parameter.requires_grad_(name in names)
            parameter.grad = None
        kept = self._state_of(names & self._active)
        active = [(name, p) for name, p in self.named.items() if name in names]
        self.optimizer = build_optimizer(self.optim, active, self.layouts)
        if kept:
            NamedState(self.optimizer).load_state_dict({name: kept.get(name, {}) for name in names})
        self._active = names

    def _state_of(self, names: frozenset[str]) -> dict[str, dict[str, torch.Tensor]]:
        """The state of these of the currently trainable parameters, as far as they have one."""
        found = self.state_dict() if names else {}
        return {name: found[name] for name in names if found.get(name)}
