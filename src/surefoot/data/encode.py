"""The outcome of encoding one example: its features, or the reason why there are none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..batch import Features


@dataclass(frozen=True, slots=True)
class Dropped:
    """An example that carries nothing to learn; counted and reported, never trained."""

    reason: str


Encoded = Sequence[Features] | Dropped  # a long text may give several items
