"""How far the log-probabilities with which tokens were sampled are from those that are trained.

Both are of the same tokens under the same weights, so they differ by rounding alone. If they differ
by more, the responses are not the policy's own, and a policy gradient is wrong without a sign of it
in the loss.

Shapes: N sampled tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)
MEAN = 0.05  # nats; bfloat16 has about 0.01
_FAR = 0.02  # nats; more at a token is more than rounding
_FEW = 0.2  # of all tokens


@dataclass(frozen=True)
class Mismatch:
    """The difference at each token, sampled minus trained."""

    differences: NDArray[np.float64]  # [N]

    @property
    def figures(self) -> Mapping[str, float]:
        """The mean and largest distance in nats, and the KL divergence of the trained policy from
        the sampled one, which is estimated by r - 1 - log r (http://joschu.net/blog/kl-approx.html)
        with r the ratio of trained to sampled probability."""
        distances_N = np.abs(self.differences)
        ratios_N = np.exp(-self.differences)
        return {
            "sampling_gap": float(distances_N.mean()),
            "sampling_gap_max": float(distances_N.max()),
            "sampling_kl": float((ratios_N - 1 + self.differences).mean()),
        }

    @property
    def cause(self) -> str | None:
        """What is likely wrong, or None if nothing is."""
        distances_N = np.abs(self.differences)
        if not np.isfinite(self.differences).all():
            return "a log-probability is not finite"
        if distances_N.mean() <= MEAN:
            return None
        share = float((distances_N > _FAR).mean())
        if share <= _FEW:
            return (
                f"few tokens differ ({share:.0%}), as where experts are chosen otherwise, or where "
                "few bits round improbable tokens; float32 would tell (train.precision)"
            )
        return (
            f"most tokens differ ({share:.0%}), as if they were sampled with other weights, "
            "without the adapter, at another temperature, or after another prompt"
        )


def mismatch(sampled_N: NDArray[np.float64], trained_N: NDArray[np.float64]) -> Mismatch:
    """Of log-probabilities of the same tokens, as sampled and as trained; N is not 0."""
    return Mismatch(sampled_N.astype(np.float64) - trained_N.astype(np.float64))


def warn_of(found: Mismatch) -> None:
    """Log a warning if the responses may not be the policy's own."""
    if (cause := found.cause) is not None:
        figures = found.figures
        logger.warning(
            "the log-probabilities of the responses as sampled and as trained differ by %.3g nats "
            "on average (at most %.3g): %s. Gradients are those of other responses than the "
            "policy's own",
            figures["sampling_gap"],
            figures["sampling_gap_max"],
            cause,
        )
