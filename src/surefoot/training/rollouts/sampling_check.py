"""Check that what was sampled is what is trained, on a few rollouts of each window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..objectives.sampling_mismatch import mismatch, warn_of
from .rollout import Rollout

if TYPE_CHECKING:
    from ..stage import StageContext

_MOST = 16  # rollouts; they cost one forward pass more


def sampling_figures(
    context: StageContext, policy: str, rollouts: Sequence[Rollout]
) -> Mapping[str, float]:
    """How far the log-probabilities as sampled are from those of the model of role ``policy``, for
    metrics. Logs a warning where they differ by more than rounding."""
    known = [one for one in rollouts if one.num_sampled]
    if not known:
        return {}
    chosen = known[:: -(-len(known) // _MOST)]
    outputs = context.compute(policy, [one.features(0.0) for one in chosen])
    trained = [logp for one in outputs if one.logps is not None for logp in one.logps.tolist()]
    found = mismatch([logp for one in chosen for logp in one.sampled_logps], trained)
    warn_of(found)
    return found.figures
