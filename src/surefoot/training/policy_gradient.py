"""The mathematics of policy gradients: pure functions, each with its source.

Shapes: N trained positions, A responses. ``logps_N`` are log-probabilities of the policy that is
trained, ``old_N`` those of the policy that sampled, ``advantages_N`` how much better than expected
a response is, and a ratio that of both probabilities. A surrogate returns its gains [N], to be
maximized, and [N] whether its bound keeps the gradient of a position from the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .losses import spread_over_answers, sums_of_answers

if TYPE_CHECKING:
    import torch

    Gains = tuple[torch.Tensor, torch.Tensor]
if TYPE_CHECKING:
    import torch


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
