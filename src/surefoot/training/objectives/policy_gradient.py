"""The mathematics of policy gradients: pure functions, each with its source.

Shapes: N trained positions, G samples of a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def group_advantages(rewards_G: Sequence[float | None], epsilon: float = 1e-4) -> list[float]:
    """How much better each sample is than its group, in standard deviations (GRPO,
    arXiv:2402.03300); 0 for a sample without a reward."""
    known = [reward for reward in rewards_G if reward is not None]
    if len(known) < 2:
        return [0.0] * len(rewards_G)
    mean = math.fsum(known) / len(known)
    spread = math.sqrt(math.fsum((r - mean) ** 2 for r in known) / (len(known) - 1))
    return [0.0 if r is None else (r - mean) / (spread + epsilon) for r in rewards_G]


def clipped(
    logps_N: torch.Tensor, old_N: torch.Tensor, advantages_N: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] PPO's clipped surrogate (arXiv:1707.06347), to be maximized, and [N] whether it is
    clipped."""
    ratio_N = (logps_N - old_N).exp()
    free_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(1 - clip, 1 + clip) * advantages_N
    return free_N.minimum(bounded_N), bounded_N < free_N
