"""A trial of a recipe's rewards on responses that its model samples, before anything is trained."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ..batch import Features
from ..data.example import Dropped
from ..data.rows.catalog import training_examples
from ..data.text.codec import Codec
from ..errors import DataError, RecipeError, RunError
from ..parallel.world import ALONE
from ..run.contexts import context_of
from ..run.parts import RunParts
from ..training.kept_rollouts import Recorded
from ..training.policy_gradient import is_flat
from ..training.stage import POLICY
from .evaluation import encoded, ready_to_measure, staying
from .model_loading import open_start

MOST_ROWS = 1000  # that are looked at for so many prompts


@dataclass(frozen=True)
class RewardReport:
    """One reward of all responses; None where no response has one."""

    name: str
    lowest: float | None
    mean: float | None
    highest: float | None
    num_missing: int  # responses without it
    num_changed: int  # that got another one the second time

    @classmethod
    def of(
        cls, name: str, first: Sequence[float | None], again: Sequence[float | None]
    ) -> RewardReport:
        """That of two calls for the same responses."""
        rewards = _known(first)
        changed = sum(a != b for a, b in zip(first, again, strict=True))
        missing = len(first) - len(rewards)
        if not rewards:
            return cls(name, None, None, None, missing, changed)
        mean = math.fsum(rewards) / len(rewards)
        return cls(name, min(rewards), mean, max(rewards), missing, changed)


@dataclass(frozen=True)
class CheckedResponse:
    """A response and its rewards."""

    origin: str
    prompt: str
    response: str
    rewards: dict[str, float | None]
    reward: float | None


@dataclass(frozen=True)
class RewardCheck:
    """What the rewards of a recipe are like."""

    rewards: Sequence[RewardReport]
    num_groups: int
    num_flat_groups: int  # whose responses all have the same reward: nothing to learn from
    seconds: float  # of sampling and of rewarding twice
    responses: Sequence[CheckedResponse]


def check_rewards(parts: RunParts, count: int) -> RewardCheck:
    """Sample a group for each of the first ``count`` prompts, and reward all responses twice.
    Raises ``RecipeError`` if the stage has no reward, ``RunError`` if one fails."""
    stage, codec = parts.stage, parts.codec
    if not stage.max_new_tokens:
        raise RecipeError("stage: nothing is sampled and rewarded; expected one such as grpo")
    opened, items = open_start(parts), _prompts(parts, count)
    longest = max(len(item["input_ids"]) for item in items) + stage.max_new_tokens
    started = time.monotonic()
    with ready_to_measure(opened, parts, longest) as network:
        networks = {POLICY: network, **staying(parts, codec, ALONE)}
        context = replace(context_of(parts, networks, ALONE), times=2)
        stage.prepare(context, items)
    if not context.recorded:
        raise RecipeError("stage: it computes no rewards; expected one such as grpo")
    if not any(values for values in map(_known, context.recorded[0].by_reward[0].values())):
        raise RunError("no response has a reward: see the warnings above")
    return _report(context.recorded[0], codec, time.monotonic() - started)


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _prompts(parts: RunParts, count: int) -> list[Features]:
    """The first prompts of the training datasets that are not dropped."""
    prompts: list[Features] = []
    for example in islice(training_examples(parts.data), MOST_ROWS):
        if len(prompts) < count:
            (outcome,) = parts.stage.encode([example], parts.codec)
            if not isinstance(outcome, Dropped):
                prompts += encoded(parts.stage, [example], parts.codec)
    if not prompts:
        raise DataError(f"data.datasets: no prompt in the first {MOST_ROWS:,} rows can be used")
    return prompts[:count]


def _report(recorded: Recorded, codec: Codec, seconds: float) -> RewardCheck:
    first, again = recorded.by_reward
    totals = recorded.rewards
    groups: dict[int, list[float | None]] = {}
    for rollout, reward in zip(recorded.rollouts, totals, strict=True):
        groups.setdefault(rollout.group, []).append(reward)
    decode = codec.tokenizer.decode
    responses = [
        CheckedResponse(
            rollout.row.origin,
            decode(list(rollout.prompt)),
            codec.response_text(rollout.completion),
            {name: values[i] for name, values in first.items()},
            totals[i],
        )
        for i, rollout in enumerate(recorded.rollouts)
    ]
    return RewardCheck(
        [RewardReport.of(name, first[name], again[name]) for name in first],
        len(groups),
        sum(map(is_flat, groups.values())),
        seconds,
        responses,
    )
