"""Advantages of sampled responses, by their rewards alone or with a value head: pure functions,
each with its source.

By name, an advantage is a function of all rewards of the global window, by group, and of the
lengths of the responses in the same order. A response without a reward has the advantage 0, and
counts nowhere. To add one: write its function, add its line.

Shapes: T tokens of a response, N trained positions. The value of a token is that of the text before
it, at which the token is chosen; after the last token of a response the value is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


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
    advantages = []
    for rewards_G in groups:
        count = _count(rewards_G)
        factor = count / (count - 1) if count > 1 else 0.0
        advantages += [value * factor for value in _centered(rewards_G)]
    return advantages


def reinforce_plus_plus(groups: Sequence[Rewards], lengths: Sequence[int]) -> list[float]:
    """REINFORCE++ (arXiv:2501.03262): whitened over all tokens of the window."""
    return _whitened(list(chain(*groups)), lengths)


def reinforce_plus_plus_baseline(groups: Sequence[Rewards], lengths: Sequence[int]) -> list[float]:
    """REINFORCE++-baseline of the same paper: less the mean of the group, then whitened."""
    centered = chain(*map(_centered, groups))
    pairs = zip(chain(*groups), centered, strict=True)
    return _whitened([None if reward is None else value for reward, value in pairs], lengths)


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
    mean, rewards = _mean(rewards_G), [reward for reward in rewards_G if reward is not None]
    return math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1))


def _whitened(rewards: Rewards, lengths: Sequence[int]) -> list[float]:
    """With mean 0 and variance 1 over the tokens of all responses with a reward."""
    if is_flat(rewards):
        return [0.0] * len(rewards)
    pairs = [(r, n) for r, n in zip(rewards, lengths, strict=True) if r is not None]
    count = sum(n for _, n in pairs)
    mean = math.fsum(r * n for r, n in pairs) / max(1, count)
    variance = math.fsum((r - mean) ** 2 * n for r, n in pairs) / max(1, count)
    scale = math.sqrt(max(variance, LEAST_VARIANCE))
    return [0.0 if reward is None else (reward - mean) / scale for reward in rewards]


Floats: TypeAlias = "NDArray[np.float64]"


def generalized_advantages(
    rewards_T: Sequence[float] | Floats,
    values_T: Sequence[float] | Floats,
    *,
    gamma: float,
    gae_lambda: float,
) -> Floats:
    """[T] generalized advantage estimation (arXiv:1506.02438, equation 16): ``A_t = delta_t + gamma
    lambda A_t+1`` with ``delta_t = r_t + gamma V_t+1 - V_t``."""
    import numpy as np

    advantages_T = np.zeros(len(values_T))
    advantage = value_after = 0.0
    for t in reversed(range(len(values_T))):
        delta = float(rewards_T[t]) + gamma * value_after - float(values_T[t])
        advantage = delta + gamma * gae_lambda * advantage
        advantages_T[t], value_after = advantage, float(values_T[t])
    return advantages_T


def whitened(arrays: Sequence[Floats], *, shift_mean: bool = True) -> list[Floats]:
    """The numbers of all lists, divided by their standard deviation, around 0 or around the mean
    that they have."""
    import numpy as np

    values = np.concatenate(arrays)
    if len(values) < 2:
        return list(arrays)
    mean = values.mean()
    standardized = (values - mean) / np.sqrt(values.var(ddof=1) + 1e-8)
    ends = np.cumsum([len(array) for array in arrays])[:-1]
    return np.split(standardized if shift_mean else standardized + mean, ends)


def explained_variance(values: Sequence[Floats], returns: Sequence[Floats]) -> float:
    """The share of the variance of returns that the values explain; 0 if there is none."""
    import numpy as np

    all_returns, all_values = np.concatenate(returns), np.concatenate(values)
    variance = float(all_returns.var())
    return 1 - float((all_returns - all_values).var()) / variance if variance else 0.0


def clipped_value_losses(
    values_N: torch.Tensor, old_N: torch.Tensor, returns_N: torch.Tensor, clip: float | None
) -> torch.Tensor:
    """[N] half the squared error of each value, or that of the value with its change since the
    window began clipped, if it is larger (arXiv:1707.06347, as in OpenAI's baselines)."""
    losses_N = (values_N - returns_N) ** 2
    if clip is not None:
        near_N = old_N + (values_N - old_N).clamp(-clip, clip)
        losses_N = losses_N.maximum((near_N - returns_N) ** 2)
    return 0.5 * losses_N


KLEstimator: TypeAlias = Literal["k1", "k3"]
MAX_CHANGE = 0.2  # of the relative error of a window, in the update of the coefficient


def kl_estimates(logps_T: Floats, reference_T: Floats, kind: KLEstimator) -> Floats:
    """[T] an estimate of the KL divergence at each token (Schulman, "Approximating KL divergence",
    2020): ``k1`` is the log-ratio, ``k3`` is ``e^-k1 - 1 + k1``, which is never negative."""
    import numpy as np

    k1_T = logps_T - reference_T
    return k1_T if kind == "k1" else np.expm1(-k1_T) + k1_T


def adapted_coefficient(
    coefficient: float, kl: float, *, target: float, count: int, horizon: int
) -> float:
    """The coefficient after a window of ``count`` responses whose mean KL divergence was ``kl``
    (arXiv:1909.08593, section 2.2)."""
    error = min(max(kl / target - 1, -MAX_CHANGE), MAX_CHANGE)
    return coefficient * (1 + error * count / horizon)


@dataclass(frozen=True)
class RunningMoments:
    """Count, mean and sum of squared differences from the mean, of all numbers so far."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def added(self, values: Sequence[float]) -> RunningMoments:
        """With more numbers (Chan, Golub and LeVeque, 1979)."""
        if not values:
            return self
        mean = math.fsum(values) / len(values)
        squares = math.fsum((value - mean) ** 2 for value in values)
        count, apart = self.count + len(values), mean - self.mean
        return RunningMoments(
            count,
            self.mean + apart * len(values) / count,
            self.squares + squares + apart**2 * self.count * len(values) / count,
        )

    @property
    def deviation(self) -> float:
        """The standard deviation, with Bessel's correction; 0 of fewer than two numbers."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def state(self) -> dict[str, float]:
        """What ``of`` reads."""
        return {f"score_{name}": value for name, value in asdict(self).items()}

    @classmethod
    def of(cls, state: Mapping[str, float]) -> RunningMoments:
        """Those of a state; of no numbers, if it has none."""
        names = ("count", "mean", "squares")
        return cls(*(state.get(f"score_{name}", 0.0) for name in names))
