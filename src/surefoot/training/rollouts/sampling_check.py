"""Check that what was sampled is what is trained, on a few rollouts of each window."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...generate.servers.server import Sampler
from .rollout import Rollout

if TYPE_CHECKING:
    from ..stage import StageContext

logger = logging.getLogger(__name__)
MEAN = 0.05  # nats; bfloat16 has 0.001 to 0.01, float32 0.000001
_FAR = 0.02  # nats; more at a token is more than rounding
_FEW = 0.2  # of all tokens
_MOST = 16  # rollouts; they cost one forward pass more


def sampling_figures(
    context: StageContext, policy: str, rollouts: Sequence[Rollout], sampler: Sampler
) -> Mapping[str, float]:
    """How far the log-probabilities as sampled are from those of the model of role ``policy``, for
    metrics. Logs a warning where they differ by more than rounding."""
    known = [one for one in rollouts if one.num_sampled]
    chosen = known[:: -(-len(known) // _MOST)] if known else []
    outputs = context.compute(policy, [one.features(0.0) for one in chosen]) if chosen else []
    trained = [logp for one in outputs if one.logps is not None for logp in one.logps.tolist()]
    return gap_figures(chosen, trained, sampler)


def gap_figures(
    rollouts: Sequence[Rollout], trained: Sequence[float], sampler: Sampler
) -> Mapping[str, float]:
    """The same of rollouts whose log-probabilities are ``trained``, one after the other."""
    if not rollouts:
        return {}
    found = mismatch([logp for one in rollouts for logp in one.sampled_logps], trained)
    server, is_scaled = sampler.server, rollouts[0].temperature != 1
    cure = server.on_other_temperature if server is not None and is_scaled else ""
    warn_of(found, cure)
    return found.figures


@dataclass(frozen=True)
class Mismatch:
    """The difference at each token, sampled minus trained."""

    differences: Sequence[float]

    @property
    def figures(self) -> Mapping[str, float]:
        """The mean and largest distance in nats, and the KL divergence of the trained policy from
        the sampled one, which is estimated by r - 1 - log r (http://joschu.net/blog/kl-approx.html)
        with r the ratio of trained to sampled probability."""
        count, distances = len(self.differences), [abs(each) for each in self.differences]
        # not beyond what a float holds
        terms = [math.expm1(min(-each, 700.0)) + each for each in self.differences]
        return {
            "sampling_gap": sum(distances) / count,
            "sampling_gap_max": max(distances),
            "sampling_kl": sum(terms) / count,
        }

    @property
    def cause(self) -> str | None:
        """What is likely wrong, or None if nothing is."""
        if not all(map(math.isfinite, self.differences)):
            return "a log-probability is not finite"
        if self.figures["sampling_gap"] <= MEAN:
            return None
        share = sum(abs(each) > _FAR for each in self.differences) / len(self.differences)
        if share <= _FEW:
            return (
                f"few tokens differ ({share:.0%}), as where experts are chosen otherwise, or where "
                "few bits round improbable tokens; train.precision: fp32 would show which"
            )
        return (
            f"most tokens differ ({share:.0%}), as if they were sampled with other weights, "
            "without the adapter, at another temperature, or after another prompt"
        )


def mismatch(sampled: Sequence[float], trained: Sequence[float]) -> Mismatch:
    """Of log-probabilities of the same tokens, as sampled and as trained, at least one."""
    return Mismatch([one - other for one, other in zip(sampled, trained, strict=True)])


def warn_of(found: Mismatch, cure: str = "") -> None:
    """Log a warning, and perhaps what to do, if the responses may not be the policy's own."""
    if (cause := found.cause) is not None:
        figures = found.figures
        logger.warning(
            "the log-probabilities of the responses as sampled and as trained differ by %.3g nats "
            "on average (at most %.3g): %s. Gradients are those of other responses than the "
            "policy's own%s",
            figures["sampling_gap"],
            figures["sampling_gap_max"],
            cause,
            f"; {cure}" if cure else "",
        )
