"""A network that is trained: the outputs its loss needs, its optimizer, and who is trainable."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..batch import OutputSpec
from ..checkpoint.state.states import Stateful
from ..network.network import Network, Weights
from ..optim.groups import Named
from .step import Step


def everything(_step: int, names: Sequence[str]) -> Collection[str]:
    """All parameters are trained at every step."""
    return names


@dataclass
class Learner:
    """One trained network."""

    network: Network
    spec: OutputSpec
    step: Step  # its optimizer may be replaced between two steps
    build: Callable[[Named], torch.optim.Optimizer]
    trainable: Callable[[int, Sequence[str]], Collection[str]]  # of all names, at a step
    _names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self._names = frozenset(self.network.named)

    @property
    def module(self) -> nn.Module:
        """The model with its adapter."""
        return self.network.module

    @property
    def weights(self) -> Weights:
        """What a checkpoint contains of the model."""
        return self.network.weights

    @property
    def optimizer_state(self) -> Stateful:
        """What a checkpoint contains of the optimizer."""
        return self.network.optimizer_state(self.step.optimizer)

    def turn(self, step: int) -> None:
        """Let those parameters be trained that are at ``step``, with an optimizer of their own."""
        named = self.network.named
        names = frozenset(self.trainable(step, list(named)))
        if names == self._names:
            return
        self._names = names
        for name, parameter in named.items():
            parameter.requires_grad_(name in names)
            parameter.grad = None
        self.step.optimizer = self.build([(n, p) for n, p in named.items() if n in names])
