"""Counts of sequences by length, for a picture: one of the bounds is ``cutoff_len``."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

BINS = 8  # up to cutoff_len


@dataclass(frozen=True)
class LengthBin:
    """The sequences with more than ``above`` tokens, and at most ``most``."""

    above: int
    most: int
    count: int


def length_bins(lengths: Mapping[int, int], cutoff_len: int) -> list[LengthBin]:
    """Bins of equal width up to ``cutoff_len``, doubled from there on, the last up to the
    longest."""
    if not lengths:
        return []
    edges = _edges(max(lengths), cutoff_len)
    counts: Counter[int] = Counter()
    for length, count in lengths.items():
        counts[bisect_left(edges, length)] += count
    return [
        LengthBin(above, most, counts[number])
        for number, (above, most) in enumerate(pairwise([0, *edges]))
    ]


def quantile(lengths: Mapping[int, int], place: int) -> int:
    """The length at a place of all of them in order, counted from 0."""
    seen = 0
    for length in sorted(lengths):
        seen += lengths[length]
        if seen > place:
            return length
    raise IndexError(place)


def _edges(longest: int, cutoff_len: int) -> list[int]:
    """The upper bounds: one at ``cutoff_len``, the last at ``longest``."""
    top = min(longest, cutoff_len)
    steps = {top * i // BINS for i in range(1, BINS + BINS // 2)}
    steps |= {top << power for power in range(1, (longest // top).bit_length())} if top else set()
    return sorted({step for step in steps if 0 < step < longest} | {longest})
