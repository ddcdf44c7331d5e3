"""Computations of stages before they train: outputs of models, samples, rewards.

Inputs are examples of the global window, results are global. This module handles their assignment
to ranks and micro-batches, devices, evaluation mode and sums over ranks.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..batch import Batch, Features, Outputs, OutputSpec
from ..data.data_order import Index
from ..data.order.micro_batches import Collation, in_turn
from ..data.text.codec import Codec
from ..data.text.collation import num_trained
from ..generate.generation import Sample
from ..generate.section import GenerateSection
from ..model.loading import device
from ..model.numerics import derive
from ..network.network import Network
from ..parallel.progress import wait_for_ranks
from ..parallel.world import World
from ..schema.locations import FunctionPath
from .kept_rollouts import Recorded
from .out_of_memory import MemoryGuard
from .rewards import (
    NO_TEXTS,
    Rewarded,
    RewardProcess,
    RewardResult,
    computed,
    rewarded,
    stepped,
    texts_of,
)
from .served_policy import ServedPolicy, WindowRequest
from .stage import POLICY, Events, OnError, Prompts, Reduction, Replies, Rewards, Rollouts, Stage


@dataclass(frozen=True)
class NetworkContext:
    """The context of a window, over the networks of a run."""

    codec: Codec
    stage: Stage
    networks: Mapping[str, Network]  # by role
    memory: MemoryGuard
    collation: Collation
    world: World
    seed: int  # of what is sampled: of this window and no other
    process: RewardProcess = field(default_factory=RewardProcess)
    state: Mapping[str, float] = field(default_factory=dict)  # of the stage after the last window
    served: ServedPolicy | None = None  # what samples; None: the policy's own network
    place: tuple[int, int] = (-1, 0)  # of the window
    times: int = 1  # that rewards are computed; the first result counts
    recorded: list[Recorded] = field(default_factory=list)  # the rollouts that were rewarded
    version: int | None = None  # optimizer steps behind the policy's weights, if that is known

    def compute(self, role: str, examples: Sequence[Features]) -> list[Outputs]:
        """The outputs of a role's model for each example, in its own precision."""
        return self.memory.forward(lambda size: self._compute(role, examples, size))

    def _compute(self, role: str, examples: Sequence[Features], size: int) -> list[Outputs]:
        spec = spec_of(self.stage, role)
        counts = [num_trained(item) for item in examples]
        ends = np.cumsum([0, *counts])
        all_values = torch.zeros(len(spec.outputs), int(ends[-1]), dtype=torch.float64)
        dtype = torch.float32
        computed = list[tuple[torch.Tensor, torch.Tensor]]()
        with closing(self._batches(role, examples, size)) as batches:
            for items, outputs, _ in batches:
                spans = [np.arange(ends[i], ends[i + 1]) for i in items]
                # a rank without examples runs a batch without spans, too
                positions = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *spans]))
                values: list[torch.Tensor] = [getattr(outputs, name) for name in spec.outputs]
                dtype = values[-1].dtype
                each_double = [each[: len(positions)].double() for each in values]
                computed.append((positions, torch.stack(each_double)))
        # Read at the end: the host would wait for a GPU after each micro-batch.
        for positions, values_XN in computed:
            all_values[:, positions] = wait_for_ranks(values_XN.cpu)
        all_values = self.world.summed(all_values).to(dtype)
        rows = torch.split(all_values, counts, dim=1)
        return [Outputs(**dict(zip(spec.outputs, row, strict=True))) for row in rows]

    def reduce(
        self, role: str, examples: Sequence[Features], function: Reduction
    ) -> NDArray[np.float64]:
        """[examples, ...] the result of ``function`` for each batch, a row per example."""
        return self.memory.forward(lambda size: self._reduce(role, examples, function, size))

    def _reduce(
        self, role: str, examples: Sequence[Features], function: Reduction, size: int
    ) -> NDArray[np.float64]:
        computed = list[tuple[Index, torch.Tensor]]()
        with closing(self._batches(role, examples, size)) as batches:
            for items, outputs, batch in batches:
                computed.append((items, function(outputs, batch).double()))
        shape = computed[0][1].shape[1:]
        results = torch.zeros(len(examples), *shape, dtype=torch.float64)
        for items, rows in computed:  # read at the end, as above
            results[torch.from_numpy(items)] += wait_for_ranks(rows[: len(items)].cpu)
        return self.world.summed(results).numpy()

    def generate(
        self, prompts: Prompts, settings: GenerateSection, *, turn: int = 0
    ) -> list[Sample]:
        """One sample of the policy for each prompt."""
        network, stops = self.networks[POLICY], self.codec.stop_token_ids
        if self.served is not None:
            steps = self.version or 0
            request = WindowRequest(self.place, steps, prompts, settings, turn, stops)
            return self.served.generate(request)
        seed = derive(self.seed, turn) if turn else self.seed
        samples = self.memory.generate(
            settings,
            lambda fitted: network.generate(prompts, fitted, seed=seed, stop_token_ids=stops),
        )
        return [replace(sample, version=self.version) for sample in samples]

    def environment(self, path: FunctionPath, events: Events, seconds: float) -> Replies:
        """What each object of the user's class says, on rank 0. Raises ``RunError``."""
        return self.world.on_main(lambda: stepped(self.process, path, events, seconds))

    def reward(
        self, rewards: Rewards, rollouts: Rollouts, seconds: float, on_error: OnError
    ) -> Rewarded:
        """Of each reward those of all rollouts; tasks run on rank 0. Raises ``RunError``."""
        has_tasks = self.world.is_main and any(r.task is not None for r in rewards.values())
        texts = texts_of(rollouts, self.codec) if has_tasks else NO_TEXTS
        results = list[Rewarded]()
        for _ in range(self.times):
            by_reward = list[RewardResult]()
            for role, reward in rewards.items():
                if reward.task is not None:
                    task = partial(computed, self.process, reward.task, texts, seconds, on_error)
                    by_reward.append(self.world.on_main(task))
                else:
                    items = [rollout.features(0.0) for rollout in rollouts]
                    by_reward.append(RewardResult(self.reduce(role, items, _scores).tolist()))
            results.append(rewarded(by_reward))
        self.recorded.append(Recorded(rollouts, rewards, results))
        return results[0]

    @torch.no_grad()
    def _batches(
        self, role: str, examples: Sequence[Features], size: int
    ) -> Generator[tuple[Index, Outputs, Batch]]:
        """This rank's micro-batches of ``size`` with their examples, perhaps none. It is to be
        closed: until then the network may have other values."""
        network, world, spec = self.networks[role], self.world, spec_of(self.stage, role)
        collation = self.collation.for_model(network.sharing).among(examples, world.num_data_ranks)
        with network.evaluating():
            for items in in_turn(len(examples), size, world.data_rank, world.num_data_ranks):
                world.progress.tick()
                batch = collation.batch_of(items, examples).to(device())
                yield items, network.forward(batch, spec), batch


@dataclass(frozen=True)
class BlankContext:
    """Without any model, for sizes only: outputs are 0, samples have the maximum length, and every
    second one is rewarded."""

    codec: Codec
    stage: Stage
    collation: Collation
    seed: int = 0
    state: Mapping[str, float] = field(default_factory=dict)

    def compute(self, role: str, examples: Sequence[Features]) -> list[Outputs]:
        """Zeros."""
        return [zeros(num_trained(example), spec_of(self.stage, role)) for example in examples]

    def reduce(
        self, role: str, examples: Sequence[Features], function: Reduction
    ) -> NDArray[np.float64]:
        """The result of ``function`` for zeros."""
        batch = self.collation.batch(examples)
        result = function(zeros(batch.num_trained, spec_of(self.stage, role)), batch)
        return result.double().numpy()

    def generate(
        self, prompts: Prompts, settings: GenerateSection, *, turn: int = 0
    ) -> list[Sample]:
        """The longest possible responses."""
        ids = (0,) * settings.max_new_tokens
        return [Sample(ids, (0.0,) * len(ids), "length") for _ in prompts]

    def environment(self, path: FunctionPath, events: Events, seconds: float) -> Replies:
        """Nothing."""
        return [None for _ in events]

    def reward(
        self, rewards: Rewards, rollouts: Rollouts, seconds: float, on_error: OnError
    ) -> Rewarded:
        """The same of each."""
        return Rewarded([[float(number % 2) for number in range(len(rollouts))] for _ in rewards])


def _scores(outputs: Outputs, _batch: Batch) -> torch.Tensor:
    """[E] the values of a batch's examples."""
    assert outputs.values is not None
    return outputs.values


def blank_examples(
    stage: Stage, codec: Codec, examples: Sequence[Features], collation: Collation
) -> Sequence[Features]:
    """What a stage would train on, for a forward pass of which only the size matters."""
    context = BlankContext(codec, stage, collation)
    return stage.prepare(context, stage.precompute(context, examples)).examples


def spec_of(stage: Stage, role: str) -> OutputSpec:
    """The outputs that ``stage`` needs of the model of a role."""
    return stage.spec if role == POLICY else stage.auxiliary[role].spec


def zeros(count: int, spec: OutputSpec) -> Outputs:
    """Outputs of ``count`` positions, all 0."""
    values: dict[str, Any] = {name: torch.zeros(count) for name in spec.outputs}
    return Outputs(**values)
