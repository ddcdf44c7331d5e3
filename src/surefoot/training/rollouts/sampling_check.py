"""Check that what was sampled is what is trained, on a few rollouts of each window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

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
    trained = [one.logps.double().numpy() for one in outputs if one.logps is not None]
    sampled = [one.sampled_logps for one in chosen]
    found = mismatch(np.concatenate(sampled), np.concatenate(trained))
    warn_of(found)
    return found.figures
