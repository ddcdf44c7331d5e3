"""A network that is trained, with its optimizer; and the values that it had before the first
step."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..checkpoint.state.roles import ShardedState
from ..model.lora_targets import is_added
from ..network.method import Weights
from ..network.network import Network
from ..optim.trained import TrainedParameters
from ..parallel.collectives import local
from ..parallel.sharded_model import gather_nothing
from .step import Step

logger = logging.getLogger(__name__)
_SELDOM = 10  # steps between two lines of the log about blocks


@dataclass
class Learner:
    """One trained network."""

    network: Network
    step: Step  # its optimizer is that of ``trained``
    trained: TrainedParameters
    # What a checkpoint contains of the optimizer; the ranks of a pipeline make it together, once,
    # as only rank 0 loads the best weights at the end of a run.
    optimizer_state: ShardedState = field(init=False)
    _told: int | None = field(init=False, default=None)  # the step of the last line about blocks

    def __post_init__(self) -> None:
        self.optimizer_state = self.network.engine.optimizer_state(self.trained)

    def optimizer_at(self, step: int) -> torch.optim.Optimizer:
        """The optimizer for update ``step``; the log tells when it trains another block."""
        blocks, told = self.network.blocks, self._told
        if blocks.switch and (told is None or step - told >= _SELDOM):
            labels, before = blocks.labels(step), None if told is None else blocks.labels(step - 1)
            if labels != before:
                last = (step // blocks.interval + 1) * blocks.interval
                what = " and ".join(labels)
                logger.info("steps %d to %d train %s", step + 1, last, what)
                self._told = step
        return self.trained.at(step)

    @property
    def module(self) -> nn.Module:
        """The model with its adapter."""
        return self.network.module

    @property
    def num_saved_bytes(self) -> int:
        """About the bytes of this rank's part of a checkpoint, once the optimizer has a state."""
        is_full = self.weights.kind == "full"
        named = self.module.named_parameters()
        kept = [p for name, p in named if is_full or p.requires_grad or is_added(name)]
        states = self.step.optimizer.state.values()
        held = [t for state in states for t in state.values() if isinstance(t, torch.Tensor)]
        return sum(local(tensor).nbytes for tensor in [*kept, *held])

    def drop_gradients(self) -> None:
        """Free what a forward or backward pass that failed has left."""
        self.module.zero_grad(set_to_none=True)
        self.trained.drop_gradients()
        gather_nothing(self.module)

    @property
    def weights(self) -> Weights:
        """What a checkpoint contains of the model."""
        return self.network.weights


@dataclass
class InitialValues:
    """This rank's share of the trainable weights of ``network``, as they are now."""

    network: Network
    _values: Mapping[str, torch.Tensor] = field(init=False)
    _is_in_place: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        named = self.network.named.items()
        self._values = {name: _local(p).cpu().clone() for name, p in named}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While it lasts, the network has these values."""
        assert not self._is_in_place
        self._exchange()
        self._is_in_place = True
        try:
            yield
        finally:
            self._exchange()
            self._is_in_place = False

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swap them, one tensor at a time; nothing stays gathered of other values."""
        gather_nothing(self.network.module)
        for name, parameter in self.network.named.items():
            here, kept = _local(parameter), self._values[name]
            current = here.cpu().clone()
            here.copy_(kept)
            kept.copy_(current)


def _local(parameter: nn.Parameter) -> torch.Tensor:
    values = parameter.detach()
    return values.to_local() if isinstance(values, DTensor) else values
