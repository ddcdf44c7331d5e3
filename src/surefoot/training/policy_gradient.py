"""The mathematics of policy gradients, as pure functions, each with its source: how good a sampled
response was (its advantages, by rewards alone or with a value head), then what is maximized.

By name, an advantage is a function of all rewards of the global window, by group, and of the
lengths of the responses in the same order. A response without a reward has the advantage 0, and
counts nowhere. A surrogate returns its gains [N], to be maximized, and [N] whether its bound keeps
the gradient of a position from the policy. To add one of either: write its function, add its line.

Shapes: T tokens of a response, A responses, N trained positions. The value of a token is that of
the text before it, at which the token is chosen; after the last token of a response it is 0.
``logps_N`` are log-probabilities of the policy that is trained, ``old_N`` those of the policy that
sampled, ``advantages_N`` how much better than expected a response is, and a ratio that of both
probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Literal, TypeAlias

from .losses import spread_over_answers, sums_of_answers

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    Gains = tuple[torch.Tensor, torch.Tensor]


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


def leave_one_out(groups: Sequence[Rewards], _lengths: Sequence[int]) -> list[float]:
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
    "rloo": leave_one_out,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
}


def is_flat(rewards_G: Rewards) -> bool:
    """Whether no reward of a group differs from another."""
    return len({reward for reward in rewards_G if reward is not None}) < 2


def means_of_groups(groups: Sequence[Rewards]) -> list[float]:
    """The mean reward of each group, which is that of its prompt; NaN where no response has one."""
    return [_mean(rewards_G) if _count(rewards_G) else math.nan for rewards_G in groups]


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


def clipped(
    logps_N: torch.Tensor,
    old_N: torch.Tensor,
    advantages_N: torch.Tensor,
    clip: float,
    clip_high: float | None = None,
) -> Gains:
    """PPO (arXiv:1707.06347): ``min(ratio A, clamp(ratio, 1 - clip, 1 + clip_high) A)``. With a
    larger ``clip_high``, DAPO's Clip-Higher (arXiv:2503.14476)."""
    return _clipped((logps_N - old_N).exp(), advantages_N, clip, clip_high)


def dual_clipped(
    logps_N: torch.Tensor,
    old_N: torch.Tensor,
    advantages_N: torch.Tensor,
    clip: float,
    clip_high: float,
    bound: float,
) -> Gains:
    """Dual-clip PPO (arXiv:1912.09729): ``clipped``, but not under ``bound A`` where the advantage
    is negative, so that one large ratio cannot dominate."""
    gains_N, is_clipped_N = clipped(logps_N, old_N, advantages_N, clip, clip_high)
    least_N = bound * advantages_N
    is_under_N = (advantages_N < 0) & (gains_N < least_N)
    return gains_N.where(~is_under_N, least_N), is_clipped_N | is_under_N


def cispo(
    logps_N: torch.Tensor, old_N: torch.Tensor, advantages_N: torch.Tensor, clip_high: float
) -> Gains:
    """CISPO (MiniMax-M1, arXiv:2506.13585): ``min(ratio, 1 + clip_high) A log p`` with a constant
    ratio: it bounds the weight of a position, and drops no gradient."""
    ratio_N = (logps_N - old_N).detach().exp()
    gains_N = ratio_N.clamp(max=1 + clip_high) * advantages_N * logps_N
    return gains_N, ratio_N > 1 + clip_high


def gspo(
    logps_N: torch.Tensor,
    old_N: torch.Tensor,
    advantages_N: torch.Tensor,
    owner_N: torch.Tensor,
    lengths_A: torch.Tensor,
    clip: float,
    clip_high: float,
) -> Gains:
    """GSPO (arXiv:2507.18071): ``clipped`` with one ratio for all positions of a response, the
    geometric mean of theirs."""
    means_A = sums_of_answers(logps_N - old_N, owner_N, len(lengths_A)) / lengths_A.clamp(min=1)
    ratio_N = spread_over_answers(means_A.exp(), owner_N)
    return _clipped(ratio_N, advantages_N, clip, clip_high)


def rloo(
    logps_N: torch.Tensor,
    old_N: torch.Tensor,
    advantages_N: torch.Tensor,
    owner_N: torch.Tensor,
    lengths_A: torch.Tensor,
    clip: float,
    clip_high: float,
) -> Gains:
    """RLOO (arXiv:2402.14740): a response is one action, so ``clipped`` with the ratio of the
    probabilities of all of it; each of its positions has that gain."""
    log_ratio_N = of_response(logps_N - old_N, owner_N, len(lengths_A))
    return _clipped(log_ratio_N.exp(), advantages_N, clip, clip_high)


def of_response(values_N: torch.Tensor, owner_N: torch.Tensor, num_responses: int) -> torch.Tensor:
    """[N] the sum over its response, at each position."""
    return spread_over_answers(sums_of_answers(values_N, owner_N, num_responses), owner_N)


def sapo(
    logps_N: torch.Tensor,
    old_N: torch.Tensor,
    advantages_N: torch.Tensor,
    temperature: float,
    temperature_negative: float,
) -> Gains:
    """SAPO (arXiv:2511.20347): ``4 / t sigmoid(t (ratio - 1)) A``: the gradient fades as a ratio
    leaves 1, faster the larger the temperature, which is of the sign of the advantage. Nothing is
    clipped."""
    is_good_N = advantages_N > 0
    temperatures_N = logps_N.new_full(logps_N.shape, temperature_negative)
    temperatures_N = temperatures_N.masked_fill(is_good_N, temperature)
    ratio_N = (logps_N - old_N).exp()
    gate_N = (temperatures_N * (ratio_N - 1)).sigmoid() * 4 / temperatures_N
    return gate_N * advantages_N, is_good_N & ~is_good_N


def truncated_weights(gaps_N: torch.Tensor, most: float) -> torch.Tensor:
    """[N] truncated importance sampling: what a position counts that another program sampled with
    the same weights, its probability before the first step by that as sampled, at most ``most``.
    ``gaps_N`` is the logarithm of that ratio. (fengyao.notion.site/off-policy-rl; the KL penalty
    has no such weight, as in TRL.)"""
    return gaps_N.exp().clamp(max=most)


def k1(logps_N: torch.Tensor, reference_N: torch.Tensor, old_N: torch.Tensor) -> torch.Tensor:
    """[N] an estimate of the KL divergence from the reference, the log-ratio (joschu.net/blog/
    kl-approx.html), times the ratio to the policy that sampled: so its gradient is that of the
    divergence, and not 0 on average (DeepSeek-V3.2, arXiv:2512.02556)."""
    return (logps_N - old_N).exp() * (logps_N - reference_N)


def k3(logps_N: torch.Tensor, reference_N: torch.Tensor, old_N: torch.Tensor) -> torch.Tensor:
    """[N] the same by an estimate that is never negative and varies less, ``exp(-d) + d - 1`` of
    the log-ratio d."""
    differences_N = reference_N - logps_N
    return (logps_N - old_N).exp() * (differences_N.exp() - differences_N - 1)


def _clipped(
    ratio_N: torch.Tensor, advantages_N: torch.Tensor, clip: float, clip_high: float | None
) -> Gains:
    high = clip if clip_high is None else clip_high
    free_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(1 - clip, 1 + high) * advantages_N
    return free_N.minimum(bounded_N), bounded_N < free_N


@dataclass(frozen=True)
class Positions:
    """The N trained positions of A responses, as a surrogate reads them, and its settings."""

    logps: torch.Tensor  # [N]
    old: torch.Tensor  # [N] of the policy that sampled
    advantages: torch.Tensor  # [N]
    owner: torch.Tensor  # [N] each position's response
    lengths: torch.Tensor  # [A] positions of each response
    clip: float
    clip_high: float
    dual_clip: float
    temperatures: tuple[float, float]  # of positive and of other advantages

    @property
    def three(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What every surrogate reads."""
        return self.logps, self.old, self.advantages


@dataclass(frozen=True)
class Surrogate:
    """A surrogate, what it reads, and its usual bounds."""

    compute: Callable[[Positions], tuple[torch.Tensor, torch.Tensor]]
    clip: float = 0.2
    clip_high: float | None = None  # None: that of clip
    settings: Collection[str] = ("clip", "clip_high")
    own: Mapping[str, str] = field(default_factory=dict)  # settings that it decides


SURROGATES: Mapping[str, Surrogate] = {
    "clip": Surrogate(lambda p: clipped(*p.three, p.clip, p.clip_high)),
    "dual_clip": Surrogate(
        lambda p: dual_clipped(*p.three, p.clip, p.clip_high, p.dual_clip),
        settings=("clip", "clip_high", "dual_clip"),
    ),
    "cispo": Surrogate(
        lambda p: cispo(*p.three, p.clip_high),
        clip_high=4.0,
        settings=("clip_high",),
    ),
    "gspo": Surrogate(
        lambda p: gspo(*p.three, p.owner, p.lengths, p.clip, p.clip_high),
        clip=3e-4,
        clip_high=4e-4,
    ),
    "sapo": Surrogate(
        lambda p: sapo(*p.three, *p.temperatures),
        settings=("sapo_temperature", "sapo_temperature_negative"),
    ),
    "rloo": Surrogate(
        lambda p: rloo(*p.three, p.owner, p.lengths, p.clip, p.clip_high),
        own={"advantage": "rloo", "average_over": "responses", "kl_estimator": "k1"},
    ),
}
KL = {"k1": k1, "k3": k3}
