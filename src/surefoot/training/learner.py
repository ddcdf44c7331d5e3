"""A network that is trained: the outputs for its loss, its optimizer, and its trainable
parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..batch import OutputSpec
from ..checkpoint.state.protocols import ShardedState
from ..network.method import Weights
from ..network.network import Network
from ..optim.trained import TrainedParameters
from .step import Step


@dataclass
class Learner:
    """One trained network."""

    network: Network
    spec: OutputSpec
    step: Step  # its optimizer is that of ``trained``
    trained: TrainedParameters

    @property
    def module(self) -> nn.Module:
        """The model with its adapter."""
        return self.network.module

    @property
    def weights(self) -> Weights:
        """What a checkpoint contains of the model."""
        return self.network.weights

    @property
    def optimizer_state(self) -> ShardedState:
        """What a checkpoint contains of the optimizer."""
        return self.network.optimizer_state(self.trained)

    def turn(self, step: int) -> None:
        """Make the parameters of ``step`` trainable, with their optimizer."""
        self.step.optimizer = self.trained.at(step)
