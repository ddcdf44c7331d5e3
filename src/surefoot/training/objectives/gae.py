"""Advantages and losses with a value head: pure functions, each with its source.

Shapes: T tokens of a response, N trained positions. The value of a token is that of the text before
it, at which the token is chosen; after the last token of a response the value is 0. Advantages are
float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

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

    found = np.zeros(len(values_T))
    advantage = value_after = 0.0
    for t in reversed(range(len(values_T))):
        delta = float(rewards_T[t]) + gamma * value_after - float(values_T[t])
        advantage = delta + gamma * gae_lambda * advantage
        found[t], value_after = advantage, float(values_T[t])
    return found


def whitened(each: Sequence[Floats], *, shift_mean: bool = True) -> list[Floats]:
    """The numbers of all lists, divided by their standard deviation, around 0 or around the mean
    that they have."""
    import numpy as np

    values = np.concatenate(each)
    if len(values) < 2:
        return list(each)
    mean = values.mean()
    found = (values - mean) / np.sqrt(values.var(ddof=1) + 1e-8)
    ends = np.cumsum([len(one) for one in each])[:-1]
    return np.split(found if shift_mean else found + mean, ends)


def explained_variance(values: Sequence[Floats], returns: Sequence[Floats]) -> float:
    """The share of the variance of returns that the values explain; 0 if there is none."""
    import numpy as np

    known, found = np.concatenate(returns), np.concatenate(values)
    variance = float(known.var())
    return 1 - float((known - found).var()) / variance if variance else 0.0


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
