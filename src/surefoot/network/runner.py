"""How a model is run: one forward pass to the outputs of a spec, and the two engines that run
windows of them.

The loop and the stages cannot tell one engine from the other.

What a model that is trained needs in order to generate, and what is undone afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ..batch import Batch, Hook, Loss, LossFunction, Outputs, OutputSpec, Window
from ..checkpoint.state.roles import ShardedState
from ..errors import RecipeError
from ..model import outputs
from ..model.chunked_cross_entropy import TargetDistribution
from ..model.isolation import unpacked
from ..model.loading import device
from ..model.numerics import PrecisionName, autocast
from ..model.outputs import LogprobHead
from ..model.routers import RouterBiases, has_router_loss
from ..optim.trained import TrainedParameters
from ..parallel.context_parallel import cut, joined
from ..parallel.pipeline import Finish, Pipeline, run_forward, run_window
from ..parallel.section import ParallelSection
from ..parallel.sharded_model import full_logits
from ..parallel.tensor_parallel import widened
from ..parallel.world import ALONE, RowGroup, World, vote_on_memory
from ._pipelined import PipelinedModel


@contextmanager
def gathered(module: nn.Module, inner: PreTrainedModel, *, again: bool) -> Iterator[None]:
    """All weights gathered, so that ranks with other prompts need not run in step. They take the
    memory of the unsharded model meanwhile."""
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    # PEFT's generate runs the inner model, past the root of what is sharded. Without a pass before,
    # FSDP2 would take the first layer that runs for the root, and refuse the true one later.
    # Without a pass behind, the next backward pass would prefetch what ran last on each rank.
    is_wrapped = bool(parts) and module is not inner
    try:
        if is_wrapped:
            _run_once(module)
        yield
        if is_wrapped:
            _run_once(module)
    finally:
        for part in parts:
            part.set_reshard_after_forward(again, recurse=False)
            part.reshard()


def _run_once(module: nn.Module) -> None:
    """One token through all of the model."""
    ids = torch.zeros(1, 1, dtype=torch.int64, device=next(module.parameters()).device)
    module(input_ids=ids, use_cache=False)


@dataclass(frozen=True)
class ModelForward:
    """One forward pass. Training, evaluation and the dry run of ``plan`` share it."""

    model: nn.Module  # with its adapter
    precision: PrecisionName
    vocabulary: outputs.Vocabulary | None = None  # of logits that are sharded over ranks
    head: LogprobHead | None = None  # the output head, if it can return log-probabilities
    values: nn.Linear | None = None  # the head of ``Outputs.values``
    multiple: int = 1  # sequences are padded to a multiple of it
    is_base: bool = False  # without the adapter of ``model``
    row_group: RowGroup | None = None  # the ranks that share each packed row
    # by role, the other models that ``Outputs.divergences`` may be from
    targets: Mapping[str, Callable[[Batch], TargetDistribution]] = field(default_factory=dict)

    def run(self, batch: Batch, spec: OutputSpec, hidden: torch.Tensor | None = None) -> Outputs:
        """The outputs of ``batch``, which is on the model's device, with gradients if they are
        enabled. ``hidden`` enters the last stage of a pipeline in place of embedded tokens."""
        if self.row_group is not None and batch.cu_seqlens is not None:
            return self._run_part(batch, spec, self.row_group)
        assert self.row_group is None or not torch.is_grad_enabled(), (
            "parallel.cp needs packed rows"
        )
        return self._run(batch, widened(batch, self.multiple), spec, hidden)

    def _run_part(self, batch: Batch, spec: OutputSpec, group: RowGroup) -> Outputs:
        """The outputs of a packed row, of which each rank of ``group`` computes a part."""
        least = self.multiple * group.size  # no part is empty
        is_short = batch.input_ids.shape[1] < least
        row = widened(batch, least if is_short else self.multiple).located()
        mine, part = cut(row, group, self.multiple)
        at = row.at_ends if spec.at == "ends" else row.at
        assert at is not None
        return joined(self._run(mine, mine, spec), at, part)

    def _run(
        self, batch: Batch, padded: Batch, spec: OutputSpec, hidden: torch.Tensor | None = None
    ) -> Outputs:
        target = None if spec.divergence is None else self.targets[spec.divergence.role](batch)
        with self._computing(batch):
            return outputs.compute(
                self.model,
                padded,
                spec,
                hidden=hidden,
                vocabulary=self.vocabulary,
                head=self.head,
                values=self.values,
                target=target,
            )

    @torch.no_grad()
    def target(self, batch: Batch) -> TargetDistribution:
        """The distributions at the trained positions of ``batch``, for another model to be compared
        with. Without dropout; what was gathered stays so."""
        was_training = self.model.training
        self.model.eval()
        try:
            with self._computing(batch):
                return outputs.compute_target(self.model, batch, self.head)
        finally:
            self.model.train(was_training)

    @contextlib.contextmanager
    def _computing(self, batch: Batch) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(autocast(self.precision, batch.input_ids.device))
            if self.is_base:
                stack.enter_context(without_adapter(self.model))
            yield


@dataclass(frozen=True)
class WholeEngine:
    """Every rank runs all layers, of which it may hold shards: one micro-batch after another."""

    runner: ModelForward
    parallel: ParallelSection
    only_generates: bool = False  # then it is sharded so that it can as it is
    world: World = ALONE
    biases: RouterBiases | None = None  # of routers, which count the tokens of a step

    def forward(self, batch: Batch, spec: OutputSpec) -> Outputs:
        """The outputs of ``batch``."""
        return self.runner.run(batch, spec)

    def forward_backward(
        self, window: Window, loss_of: LossFunction, spec: OutputSpec, before: Hook, after: Hook
    ) -> list[Loss]:
        """One micro-batch after the other."""
        losses = []
        totals = None
        if has_router_loss(outputs.inner_of(self.runner.model)) and len(window) > 1:
            totals = self._router_totals(window, loss_of, spec, before)
        for index, batch in enumerate(window):
            before(index)
            # Forward alone: between it and backward no rank waits in a collective (decisions/0047).
            with vote_on_memory(self.world):
                here = batch.to(device())
                with self._counting(batch):
                    answers = self.runner.run(here, spec)
                loss = loss_of(answers, here)
            if (router := answers.router) is not None:
                if totals is None:
                    totals = self.world.summed(router.counts_with(loss.weight) * _is_real(batch))
                probabilities = router.probabilities * _is_real(batch)
                router = replace(router, probabilities=probabilities, window=totals)
                loss = loss_of(replace(answers, router=router), here)
            loss.total.backward()  # type: ignore[no-untyped-call]
            # The log keeps losses, and must not keep the graph of each micro-batch with them.
            losses.append(loss.detach())
            del here, answers  # and its pictures, before the next ones are there
            after(index)
        return losses

    def _counting(self, batch: Batch) -> contextlib.AbstractContextManager[None]:
        if self.biases is None:
            return contextlib.nullcontext()
        return self.biases.counting(counts=_is_real(batch) > 0)

    @torch.no_grad()
    def _router_totals(
        self, window: Window, loss_of: LossFunction, spec: OutputSpec, before: Hook
    ) -> torch.Tensor:
        """``RouterSums.window``, by a forward pass of each micro-batch, with the random numbers of
        the one to come."""
        parts = []
        for index, batch in enumerate(window):
            before(index)
            with vote_on_memory(self.world):
                here = batch.to(device())
                answers = self.runner.run(here, spec)
                weight = loss_of(answers, here).weight
            assert answers.router is not None
            parts.append(answers.router.counts_with(weight) * _is_real(batch))
        return self.world.summed(torch.stack(parts).sum(0))

    @contextlib.contextmanager
    def generating(self, inner: PreTrainedModel, world: World) -> Iterator[None]:
        """All weights of a trained model are gathered meanwhile: each rank generates by itself, or
        with those of its ``tp``. Raises ``RecipeError`` under sequence parallelism."""
        if self.parallel.sequence_parallel and not self.only_generates:
            raise RecipeError(
                "parallel.sequence_parallel: one token at a time cannot be sharded along the "
                "sequence, so the model cannot generate; set it to false"
            )
        module, again = self.runner.model, self.parallel.reshard_after_forward
        with autocast(self.runner.precision, inner.device), contextlib.ExitStack() as stack:
            stack.enter_context(unpacked(inner))
            if not self.only_generates:
                stack.enter_context(full_logits(inner, world))
                stack.enter_context(gathered(module, inner, again=again))
            yield

    def optimizer_state(self, trained: TrainedParameters) -> ShardedState:
        """It already is that of the full model's."""
        return trained

    def replicas(self) -> Collection[nn.Parameter]:
        """There are none."""
        return frozenset()


def _is_real(batch: Batch) -> float:
    """0 for what a rank without examples computes in step with the others."""
    return float(batch.num_trained > 0)


@dataclass(frozen=True)
class PipelineEngine:
    """Every rank runs some stages of a pipeline, several micro-batches at a time."""

    staging: PipelinedModel
    pipeline: Pipeline
    runner: ModelForward  # of the last stage

    def forward(self, batch: Batch, spec: OutputSpec) -> Outputs:
        """The outputs of ``batch``, on all ranks of the pipeline."""
        return run_forward(self.pipeline, self._finish(spec), batch)

    def forward_backward(
        self, window: Window, loss_of: LossFunction, spec: OutputSpec, before: Hook, after: Hook
    ) -> list[Loss]:
        """Several micro-batches at a time."""
        finish = self._finish(spec)
        return run_window(self.pipeline, finish, window, loss_of, before=before, after=after)

    def _finish(self, spec: OutputSpec) -> Finish:
        return self.staging.finish(partial(self.runner.run, spec=spec))

    def generating(
        self, inner: PreTrainedModel, world: World
    ) -> contextlib.AbstractContextManager[None]:
        """Not possible yet. Raises ``RecipeError``."""
        raise RecipeError(
            "parallel.pp: a pipeline cannot generate yet; leave pp at 1 and use parallel.dp_shard"
        )

    def optimizer_state(self, trained: TrainedParameters) -> ShardedState:
        """With the names of what other ranks hold. A collective call."""
        return self.staging.optimizer(trained)

    def replicas(self) -> Collection[nn.Parameter]:
        """Of a weight that both ends have, the second: no norm counts it twice."""
        return self.staging.copies()


Engine = WholeEngine | PipelineEngine


@contextmanager
def without_adapter(module: nn.Module) -> Iterator[None]:
    """While it lasts, ``module``, which PEFT has wrapped, computes what its base does. PEFT makes
    every factor trainable when it enables its layers again; here each is as it was before."""
    tuner: Any = module.base_model
    before = {name: (p, p.requires_grad) for name, p in module.named_parameters()}
    tuner.disable_adapter_layers()
    try:
        yield
    finally:
        tuner.enable_adapter_layers()
        for name, parameter in module.named_parameters():
            original, is_trained = before[name]
            original.requires_grad_(is_trained)
            if parameter is not original:  # gathered meanwhile
                parameter.requires_grad_(is_trained)
