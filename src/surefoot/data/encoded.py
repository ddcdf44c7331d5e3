"""The outcome of encoding one example: features, perhaps cut, or why there are none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..batch import Features


@dataclass(frozen=True, slots=True)
class Dropped:
    """An example that carries nothing to learn; counted and reported, never trained.

    Equal reasons are counted together, so a reason names no row and no length.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Truncated:
    """Features of an example that lost a part to ``cutoff_len``; counted and reported."""

    features: Sequence[Features]


Encoded = Sequence[Features] | Truncated | Dropped  # a long text may give several items
