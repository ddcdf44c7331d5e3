"""The order of items and the validation split, as pure functions of a few integers.

The order is computed with integer arithmetic that is spelled out here, so it depends on no
library's version: a run that is resumed after an upgrade sees the same data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, counted

Index = NDArray[np.int64]
Description = Mapping[str, int | str | bool]  # what an order depends on, for a checkpoint
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the step of splitmix64
MASK = 2**64 - 1
# Interleaved orders are those of ``datasets.interleave_datasets`` for the same seed. They are
# computed here, so that they don't change with that library's version.
Strategy = Literal["concat", "interleave_under", "interleave_over", "interleave_once"]
DRAWS = 1000  # that are drawn at once, as the library does it: the numbers depend on it


def permutation(length: int, *, seed: int, stream: int) -> Index:
    """A permutation of the numbers below ``length`` that depends only on (seed, stream).

    Every number gets a scrambled key, and the keys are sorted. ``stream`` distinguishes the
    permutations of one seed, such as those of the epochs.
    """
    key = np.uint64(_scramble_one(_scramble_one(seed & MASK) ^ (stream & MASK)))
    keys = scrambled(np.arange(length, dtype=np.uint64) ^ key)
    return np.argsort(scrambled(keys + key))  # no two are equal: scrambling is a bijection


def draw(below: int, *, seed: int, stream: int) -> int:
    """A number below ``below`` that depends only on (seed, stream)."""
    return _scramble_one(_scramble_one(seed & MASK) + stream & MASK) % below


def hold_out(rows: Index, *, num_rows: int, val_size: float, seed: int) -> NDArray[np.bool_]:
    """Which items to hold out for evaluation: true for all items of the held-out rows.

    All rows are permuted, and the first usable ones are held out. So if a few rows more or fewer
    are usable, for example with another template, the other rows stay on their side.

    Args:
        rows: [items] the row of each item; the items of one row stay together.
        num_rows: the number of rows, usable or not.
        val_size: a share of the usable rows if below 1, otherwise their number.
        seed: determines which rows.
    """
    distinct = np.unique(rows)
    count = math.ceil(val_size * len(distinct)) if val_size < 1 else int(val_size)
    if count >= len(distinct):
        raise DataError(
            f"data.val_size = {val_size:g} leaves nothing to train on: "
            f"found {counted(len(distinct), 'usable row')}"
        )
    # Of all rows, usable or not: a row that a new version drops moves at most one other to the
    # other side.
    order = permutation(num_rows, seed=seed, stream=-1)
    usable = order[np.isin(order, distinct)]
    return np.isin(rows, usable[:count])


def scrambled(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Steele, Lea and Flood's splitmix64 finalizer: a bijection on 64 bits; arithmetic wraps."""
    x = x + np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _scramble_one(value: int) -> int:
    return int(scrambled(np.array([value], dtype=np.uint64))[0])


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
        # As ``datasets.interleave_datasets`` draws, in blocks of 1,000: teams that move compare
        # runs row by row. If numpy ever draws other numbers, the fingerprint of the data differs,
        # and a resume is refused (decisions/0059).
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
