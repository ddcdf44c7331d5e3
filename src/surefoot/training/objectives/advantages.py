"""Advantages of sampled responses by name: how much better each is than was to be expected.

An advantage is a function of all rewards of the global window, by group, and of the lengths of the
responses in the same order. A response without a reward has the advantage 0, and counts nowhere.
To add one: write its function, add its line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

Rewards = Sequence[float | None]
EPSILON = 1e-4  # added to the standard deviation of a group
LEAST_VARIANCE = 1e-8  # of a window


def group_advantages(rewards_G: Rewards, epsilon: float = EPSILON) -> list[float]:
    """How much better each sample is than its group, in standard deviations (GRPO,
    arXiv:2402.03300); 0 for a sample without a reward."""
    centered_G, spread = _centered(rewards_G), _spread(rewards_G)
    return [value / (spread + epsilon) for value in centered_G]


def group(groups: Sequence[Rewards], _lengths: Sequence[int]) -> list[float]:
    """GRPO (arXiv:2402.03300)."""
    return [value for rewards_G in groups for value in group_advantages(rewards_G)]


def dr_grpo(groups: Sequence[Rewards], _lengths: Sequence[int]) -> list[float]:
    """Dr. GRPO (arXiv:2503.20783): not divided by the standard deviation, which gives weight to
    prompts that are very easy or very hard."""
    return [value for rewards_G in groups for value in _centered(rewards_G)]


def rloo(groups: Sequence[Rewards], _lengths: Sequence[int]) -> list[float]:
    """RLOO (arXiv:2402.14740): the baseline of a response is the mean of the *others* of its group,
    so that it is independent of the response."""
    found = []
    for rewards_G in groups:
        count = _count(rewards_G)
        factor = count / (count - 1) if count > 1 else 0.0
        found += [value * factor for value in _centered(rewards_G)]
    return found


def reinforce_plus_plus(groups: Sequence[Rewards], lengths: Sequence[int]) -> list[float]:
    """REINFORCE++ (arXiv:2501.03262): whitened over all tokens of the window."""
    return _whitened(list(chain(*groups)), lengths)


def reinforce_plus_plus_baseline(groups: Sequence[Rewards], lengths: Sequence[int]) -> list[float]:
    """REINFORCE++-baseline of the same paper: less the mean of the group, then whitened."""
    centered = chain(*map(_centered, groups))
    known = zip(chain(*groups), centered, strict=True)
    return _whitened([None if reward is None else value for reward, value in known], lengths)


ADVANTAGES: Mapping[str, Callable[[Sequence[Rewards], Sequence[int]], list[float]]] = {
    "group": group,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
}


def is_flat(rewards_G: Rewards) -> bool:
    """Whether no reward of a group differs from another."""
    return len({reward for reward in rewards_G if reward is not None}) < 2


def _count(rewards_G: Rewards) -> int:
    return sum(reward is not None for reward in rewards_G)


def _mean(rewards_G: Rewards) -> float:
    return math.fsum(r for r in rewards_G if r is not None) / max(1, _count(rewards_G))


def _centered(rewards_G: Rewards) -> list[float]:
    """Less their mean; exactly 0 if all are equal, whose mean may be rounded."""
    if is_flat(rewards_G):
        return [0.0] * len(rewards_G)
    mean = _mean(rewards_G)
    return [0.0 if reward is None else reward - mean for reward in rewards_G]


def _spread(rewards_G: Rewards) -> float:
    mean, known = _mean(rewards_G), [reward for reward in rewards_G if reward is not None]
    return math.sqrt(math.fsum((r - mean) ** 2 for r in known) / max(1, len(known) - 1))


def _whitened(rewards: Rewards, lengths: Sequence[int]) -> list[float]:
    """With mean 0 and variance 1 over the tokens of all responses with a reward."""
    if is_flat(rewards):
        return [0.0] * len(rewards)
    known = [(r, n) for r, n in zip(rewards, lengths, strict=True) if r is not None]
    count = sum(n for _, n in known)
    mean = math.fsum(r * n for r, n in known) / max(1, count)
    variance = math.fsum((r - mean) ** 2 * n for r, n in known) / max(1, count)
    scale = math.sqrt(max(variance, LEAST_VARIANCE))
    return [0.0 if reward is None else (reward - mean) / scale for reward in rewards]
