"""Check that what was sampled is what is trained, on a few rollouts of each window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...generate.servers.server import Sampler
from ..objectives.sampling_mismatch import mismatch, warn_of
from .rollout import Rollout

if TYPE_CHECKING:
    from ..stage import StageContext

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
