"""A model that computes outputs, is trained and generates: the one interface to it.

Only this folder knows whether it is complete, sharded or a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from ..batch import Batch, Hook, Loss, LossFunction, Outputs, OutputSpec, Window
from ..checkpoint.state.roles import MODEL, FileRole, ShardedState
from ..checkpoint.state.states import FileState, PartialState
from ..generate.generation import Chooser, Decode, Ids, ReplicaShare, Sample, SampleStore, sample
from ..generate.section import GenerateSection
from ..model.isolation import PromptSharing, settle_attention, verify_parts
from ..model.loading import device
from ..model.routers import RouterBiases
from ..optim.blocks import TrainedBlocks
from ..optim.optimizer import Optimizer
from ..optim.state_tensor import ParameterKinds
from ..optim.trained import TrainedParameters
from ..parallel.sharded_model import gather_nothing
from ..parallel.sharding import DATA_AXES, Cuts
from ..parallel.world import World
from ._coverage import FULL, CoverageRow, table
from .draft import NetworkOptions
from .heads import HEADS, Heads, HeadWeights
from .method import Weights
from .runner import Engine, ModelForward


@dataclass(frozen=True)
class Network:
    """A model, loaded, adapted, sharded and materialized: complete, or a pipeline stage."""

    module: nn.Module  # with its adapter
    inner: PreTrainedModel  # the transformers model without it
    weights: Weights  # what its weight file contains
    named: Mapping[str, nn.Parameter]  # this rank's that may be trained, by the names in files
    trainable: Sequence[str]  # the names of all ranks'
    blocks: TrainedBlocks  # which of them each update changes
    layouts: ParameterKinds  # what each of them is in the model
    num_parameters: int  # of the unsharded model
    num_trainable: int
    coverage: Sequence[CoverageRow]  # of the unsharded model's weights; empty if it is not trained
    engine: Engine
    world: World
    options: NetworkOptions
    cuts: Mapping[str, Cuts] = field(default_factory=dict)  # by the names in files
    heads: Heads = field(default_factory=Heads)
    sharing: PromptSharing = field(
        default_factory=PromptSharing
    )  # whether packed rows share prompts
    biases: RouterBiases | None = None  # of routers, if each step updates them
    awaits_values: bool = False  # from a checkpoint, after which packing is to be verified
    around: Callable[[], AbstractContextManager[None]] = nullcontext  # evaluations

    @torch.no_grad()
    def forward(self, batch: Batch, spec: OutputSpec) -> Outputs:
        """The outputs of ``batch``, which is on the model's device, without gradients. Sharded
        weights may stay gathered; see ``evaluating``."""
        return self.engine.forward(batch, spec)

    def forward_backward(
        self, window: Window, loss_of: LossFunction, *, spec: OutputSpec, before: Hook, after: Hook
    ) -> list[Loss]:
        """Run ``window`` and leave its summed gradients in the parameters; one detached loss per
        micro-batch. ``before`` and ``after`` get the index of each."""
        return self.engine.forward_backward(window, loss_of, spec, before, after)

    def compared_with(self, others: Mapping[str, Network]) -> Network:
        """The same network, whose outputs may be divergences from ``others``, by role."""
        targets = {role: other.engine.runner.target for role, other in others.items()}
        return self._with_runner(replace(self.engine.runner, targets=targets))

    def without_adapter(self) -> Network:
        """The base under the adapter as a network of its own, on the same weights."""
        return self._with_runner(replace(self.engine.runner, is_base=True))

    def _with_runner(self, runner: ModelForward) -> Network:
        return replace(self, engine=replace(self.engine, runner=runner))

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Ids],
        settings: GenerateSection,
        *,
        seed: int,
        stop_token_ids: Sequence[int] = (),
        decode: Decode | None = None,
        on_answered: Callable[[int], None] | None = None,
        store: SampleStore | None = None,
    ) -> list[Sample]:
        """The responses to all ``prompts`` of token ids, in order, on every rank. A collective
        call; prompts are divided among ranks, and each sample depends on its prompt, the settings
        and the seed alone: torch's own generators are not changed. ``on_answered`` gets numbers of
        responses as they end, ``store`` the responses; ``decode`` finds the stop texts of the
        settings. Raises ``RecipeError`` if a model with this
        sharding cannot generate."""
        with self.evaluating(), self.engine.generating(self.inner, self.world):
            local_samples = sample(
                self.module,
                prompts,
                Chooser(settings, frozenset([*stop_token_ids, *self.own_stops]), decode),
                seed=seed,
                on_answered=on_answered,
                share=self.share,
                store=store,
            )
        samples = {i: s for part in self.world.gathered(local_samples) for i, s in part.items()}
        return [samples[i] for i in range(len(prompts))]

    def coverage_table(self) -> str | None:
        """Which weights are trained, as aligned text; None if all are."""
        return None if {row.trained for row in self.coverage} == {FULL} else table(self.coverage)

    @property
    def own_stops(self) -> list[int]:
        """The tokens that end a response according to the model's own generation configuration."""
        eos = self.inner.generation_config.eos_token_id
        return [i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int)]

    @property
    def share(self) -> ReplicaShare:
        """The prompts that this rank answers: those of the ranks that run in step with it."""
        world, axes = self.world, ("dp_replicate",) if self.options.only_generates else DATA_AXES
        places = world.rank_along(*axes), world.size_along(*axes)
        return ReplicaShare(*places, is_first=world.is_first_of(*axes))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode: without dropout, and with a key-value cache, which layers that recompute
        their activations refuse in training mode. Nothing stays gathered afterwards."""
        with self.around():
            was_training = self.module.training
            self.module.eval()
            try:
                yield
            finally:
                gather_nothing(self.module)
                self.module.train(was_training)

    def trained(self, optim: Optimizer) -> TrainedParameters:
        """An optimizer of ``named``, or of those of them that the method trains at a step."""
        blocks = self.blocks
        return TrainedParameters(
            optim,
            self.named,
            blocks.trainable,
            self.cuts,
            self.trainable,
            self.layouts,
            blocks.entries,
        )

    def states(self, whole: ShardedState, role: str = MODEL) -> dict[str, FileState]:
        """What checkpoints contain of it: the weights, those of each head, and of each its part of
        the ``whole`` optimizer state. No reader of the model's files finds a tensor there that the
        model has not."""
        heads, by_role = self.head_weights, dict[str, ShardedState]({role: self.weights})
        by_role[FileRole(role).optimizer] = whole
        if heads:
            rest = PartialState(whole, lambda name: self.heads.name_in_file(name) is None)
            by_role[FileRole(role).optimizer] = rest
        for name, head in heads.items():
            head_role = FileRole(name if role == MODEL else f"{role}_{name}")
            by_role[head_role.name] = head
            by_role[head_role.optimizer] = PartialState(whole, head.state_dict().__contains__)
        return {name: FileState(state) for name, state in by_role.items()}

    @property
    def head_weights(self) -> dict[str, HeadWeights]:
        """The weights of each head, by the name of the file that they have for themselves."""
        by_name = {HEADS[output]: head for output, head in self.heads.modules.items()}
        return {name: HeadWeights(name, head, self.cuts) for name, head in by_name.items()}

    def verify_packing(self) -> None:
        """Find, with the current values, an attention that is right for packed rows, and whether
        two responses may share a prompt. A collective call. Raises ``ModelError``."""
        world, options = self.world, self.options
        with self.evaluating():
            is_proven = settle_attention(
                self.inner,
                self.logps,
                options.longest,
                world.first_of,
                options.probes,
                is_stage=world.pp > 1,
            )
            self.sharing.is_proven = world.from_main(is_proven)
            if self.engine.runner.row_group is not None:
                verify_parts(self.inner, self.logps, self._logps, options.longest, world.first_of)

    def logps(self, batch: Batch) -> torch.Tensor:
        """The log-probabilities of the trained positions of ``batch``, in reading order. With
        ``parallel.cp``, each rank computes the whole row: what is found of one is of the model."""
        return self._with_runner(replace(self.engine.runner, row_group=None))._logps(batch)

    def _logps(self, batch: Batch) -> torch.Tensor:
        logps_N = self.forward(batch.to(device()), OutputSpec(("logps",))).logps
        assert logps_N is not None
        return logps_N
