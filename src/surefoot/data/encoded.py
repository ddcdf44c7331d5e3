"""The outcome of encoding an example: its features, perhaps truncated, or why it is dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..batch import Features


@dataclass(frozen=True, slots=True)
class Dropped:
    """An example without trained tokens; counted and reported, never trained.

    Equal reasons are counted together, so a reason contains no row and no length.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Truncated:
    """Features of an example that was truncated to ``cutoff_len``; counted and reported."""

    features: Sequence[Features]


Encoded = Sequence[Features] | Truncated | Dropped  # a long text may give several items


def items_of(outcome: Encoded) -> Sequence[Features]:
    """The features of an example; none if it is dropped."""
    if isinstance(outcome, Dropped):
        return ()
    return outcome.features if isinstance(outcome, Truncated) else outcome


EMPTY = Dropped('an empty response (only "weight": 1 on its turn trains on that)')
