"""A context that remembers the rollouts of a window and their rewards, for people to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...batch import Features, Outputs
from ...data.text.codec import Codec
from ...generate.section import GenerateSection
from ...schema.locations import FunctionPath
from ..rewards.reward import Rewarded, total
from ..stage import (
    Events,
    OnError,
    Prompts,
    Reduction,
    Replies,
    Rewards,
    Rollouts,
    StageContext,
)
from .rollout import Rollout

if TYPE_CHECKING:
    from ...generate.generation import Sample

ByReward = Mapping[str, Sequence[float | None]]


@dataclass(frozen=True)
class Recorded:
    """The rollouts of a window."""

    rollouts: Sequence[Rollout]
    by_reward: Sequence[ByReward]  # of each time that they were rewarded
    weights: Mapping[str, float]
    extras: Mapping[str, Sequence[object]]  # that rewards logged, of each rollout

    @property
    def rewards(self) -> list[float | None]:
        """The sum for each rollout, as it is trained on."""
        first = self.by_reward[0]
        return total([*first.values()], [self.weights[name] for name in first])


@dataclass
class RecordingContext:
    """``inner``, whose rewards are computed ``times`` times; the first result counts."""

    inner: StageContext
    times: int = 1
    found: list[Recorded] = field(default_factory=list)

    @property
    def codec(self) -> Codec:
        """That of ``inner``."""
        return self.inner.codec

    @property
    def seed(self) -> int:
        """That of ``inner``."""
        return self.inner.seed

    @property
    def state(self) -> Mapping[str, float]:
        """That of ``inner``."""
        return self.inner.state

    def compute(self, role: str, examples: Sequence[Features]) -> list[Outputs]:
        """As ``inner``."""
        return self.inner.compute(role, examples)

    def reduce(
        self, role: str, examples: Sequence[Features], function: Reduction
    ) -> NDArray[np.float64]:
        """As ``inner``."""
        return self.inner.reduce(role, examples, function)

    def generate(
        self, prompts: Prompts, settings: GenerateSection, *, turn: int = 0
    ) -> list[Sample]:
        """As ``inner``."""
        return self.inner.generate(prompts, settings, turn=turn)

    def environment(self, path: FunctionPath, events: Events, seconds: float) -> Replies:
        """As ``inner``."""
        return self.inner.environment(path, events, seconds)

    def reward(
        self, rewards: Rewards, rollouts: Rollouts, seconds: float, on_error: OnError
    ) -> Rewarded:
        """As ``inner``, and recorded."""
        every = [self.inner.reward(rewards, rollouts, seconds, on_error) for _ in range(self.times)]
        by_reward = [dict(zip(rewards, one.by_reward, strict=True)) for one in every]
        weights = {name: reward.weight for name, reward in rewards.items()}
        self.found.append(Recorded(rollouts, by_reward, weights, every[0].extras))
        return every[0]
