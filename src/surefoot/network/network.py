"""A model that computes outputs, is trained and generates: the one interface to it.

Whether it is whole, sharded or a pipeline is known in this folder only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from ..batch import Batch, Loss, LossFunction, Outputs, OutputSpec, Window
from ..checkpoint.state.states import Stateful
from ..geometry.sharding import Cuts
from ..model.attention.packed import PromptSharing
from ..optim.optimizer import Optimizer
from ..optim.trained import Trainable, TrainedParameters
from ..parallel.sharded_model import gather_nothing
from ..parallel.world import World
from ..startup import verify_packing_isolation
from .method import Weights
from .runner import Engine, Hook


@dataclass(frozen=True)
class Network:
    """A model, loaded, adapted, sharded and materialized; whole or a pipeline."""

    module: nn.Module  # with its adapter
    inner: PreTrainedModel  # the transformers model without it
    weights: Weights  # what its weight file contains
    named: Mapping[str, nn.Parameter]  # this rank's that may be trained, by the names in files
    trainable: Sequence[str]  # the names of all ranks'
    num_parameters: int  # of the unsharded model
    engine: Engine
    world: World
    cuts: Mapping[str, Cuts] = field(default_factory=dict)  # by the names in files
    sharing: PromptSharing = field(
        default_factory=PromptSharing
    )  # whether packed rows share prompts
    awaits_values: bool = False  # from a checkpoint, after which packing is to be verified

    @torch.no_grad()
    def forward(self, batch: Batch, spec: OutputSpec) -> Outputs:
        """The outputs of ``batch``, which is on the model's device, without gradients. Sharded
        weights may stay gathered; see ``release``."""
        return self.engine.forward(batch, spec)

    def forward_backward(
        self, window: Window, spec: OutputSpec, loss: LossFunction, *, before: Hook, after: Hook
    ) -> list[Loss]:
        """Run ``window`` and leave its summed gradients in the parameters; one detached loss per
        micro-batch. ``before`` and ``after`` get the index of each."""
        return self.engine.step_runner(spec)(window, loss, before=before, after=after)

    def release(self) -> None:
        """Free the weights that forward passes without a backward pass have left gathered."""
        gather_nothing(self.module)

    def trained(self, optim: Optimizer, trainable: Trainable) -> TrainedParameters:
        """An optimizer of ``named``, or of those of them that are ``trainable`` at a step."""
        return TrainedParameters(optim, self.named, trainable, self.cuts, self.trainable)

    def optimizer_state(self, trained: TrainedParameters) -> Stateful:
        """The state of an optimizer, as checkpoints contain it."""
        return self.engine.optimizer_state(trained)

    @property
    def replicas(self) -> Collection[nn.Parameter]:
        """Parameters that count on another rank, so that no norm counts them twice."""
        return self.engine.replicas()

    def verify_packing(self) -> None:
        """Prove with the present values that no document attends to another in packed rows, and
        find out whether two responses may share a prompt. All ranks together. Raises
        ``ModelError``."""
        was_training = self.module.training
        self.module.eval()
        is_proven = verify_packing_isolation(
            partial(self.forward, spec=OutputSpec(("logps",))), self.inner
        )
        self.sharing.is_proven = self.world.from_main(is_proven)
        self.release()
        self.module.train(was_training)
