"""The order of the rows of several datasets in one epoch: concatenated or interleaved.

Interleaved orders are those of ``datasets.interleave_datasets`` for the same seed. They are
computed here, so that they don't change with that library's version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..data_order import Index

Strategy = Literal["concat", "interleave_under", "interleave_over", "interleave_once"]
DRAWS = 1000  # that are drawn at once, as the library does it: the numbers depend on it


@dataclass(frozen=True)
class Mixing:
    """How datasets are mixed. Without ``probabilities``, interleaving takes them in turn."""

    strategy: Strategy = "concat"
    probabilities: tuple[float, ...] | None = None
    seed: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether each dataset follows the one before it."""
        return self.strategy == "concat"

    @property
    def repeats(self) -> bool:
        """Whether a row may occur several times in an epoch."""
        return self.strategy == "interleave_over"

    def draws(self, count: int) -> Iterator[Index]:
        """Numbers of datasets, from which the next rows are taken; without an end."""
        rng = np.random.default_rng(self.seed)
        while True:
            if self.probabilities is None:
                yield np.arange(count)
            else:
                yield rng.choice(count, size=DRAWS, p=self.probabilities)

    def is_at_end(self, taken: Sequence[int] | Index, lengths: Sequence[int] | Index) -> bool:
        """Whether an epoch ends with so many rows taken of datasets of these lengths."""
        done = [n >= length for n, length in zip(taken, lengths, strict=True)]
        return any(done) if self.strategy == "interleave_under" else all(done)


def mixed(mixing: Mixing, lengths: Sequence[int]) -> tuple[Index, Index]:
    """The dataset of each row of an epoch, and the row in its dataset."""
    if mixing.is_plain:
        which = np.repeat(np.arange(len(lengths)), lengths)
    elif mixing.probabilities is None:
        rounds = min(lengths) if mixing.strategy == "interleave_under" else max(lengths)
        which = np.tile(np.arange(len(lengths)), rounds)
    else:
        which = _drawn(mixing, lengths)
    rows = np.empty(len(which), np.int64)
    for number in range(len(lengths)):
        here = which == number
        rows[here] = np.arange(here.sum())
    sizes = np.array(lengths)[which]
    if mixing.repeats:
        return which, rows % sizes
    return which[rows < sizes], rows[rows < sizes]


def _drawn(mixing: Mixing, lengths: Sequence[int]) -> Index:
    """Numbers of datasets up to the draw with which the epoch ends."""
    blocks, taken = [], np.zeros(len(lengths), np.int64)
    for block in mixing.draws(len(lengths)):
        blocks.append(block)
        taken += np.bincount(block, minlength=len(lengths))
        if mixing.is_at_end(taken, lengths):
            break
    which = np.concatenate(blocks)
    places = (np.flatnonzero(which == number) for number in range(len(lengths)))
    ends = [
        int(place[length - 1])
        for place, length in zip(places, lengths, strict=True)
        if len(place) >= length
    ]
    last = min(ends) if mixing.strategy == "interleave_under" else max(ends)
    return which[: last + 1]
