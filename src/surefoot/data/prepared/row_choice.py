"""The rows of an epoch: those that ``num_samples`` draws, and how several datasets are mixed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...errors import DataError
from ..data_order import Index
from ..example import Example
from ..order.mixing import Mixing, mixed
from ..rows.registry import DatasetEntry
from ..rows.row_sources import BrokenRow
from ..rows.rows import read_rows
from ..section import DataSection

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DrawnRows:
    """The rows that ``num_samples`` draws of a dataset, in the order in which they are drawn."""

    order: Index  # more than there are rows: the rest is drawn again, with replacement
    num_rows: int  # of the dataset

    @property
    def distinct(self) -> Index:
        """The rows to encode, ascending."""
        return np.unique(self.order)


def draw_rows(
    entries: Sequence[DatasetEntry], *, max_samples: int | None, seed: int
) -> Mapping[str, DrawnRows]:
    """The rows of each dataset with ``num_samples``, the same as LLaMA-Factory draws: numpy's
    legacy generator, one dataset after another."""
    found: dict[str, DrawnRows] = {}
    generator = np.random.RandomState(seed % 2**32)
    for entry in entries:
        if entry.num_samples is None:
            continue
        count = sum(1 for _ in entry.source.rows())
        if not count:
            raise DataError(f"dataset {entry.name!r}: {entry.source} has no rows")
        order = generator.permutation(count)[: entry.num_samples]
        more = generator.choice(count, entry.num_samples - len(order))
        order = np.concatenate([order, more]).astype(np.int64)
        logger.info("%s: num_samples: %d drawn of %d rows", entry.name, len(order), count)
        found.setdefault(entry.name, DrawnRows(order[:max_samples], count))
    return found


def mixing_of(section: DataSection, seed: int) -> Mixing:
    """How the training datasets of a section are mixed; a single one is not."""
    if len(section.datasets) == 1:
        return Mixing()
    return Mixing(section.mix_strategy, section.interleave_probs, seed)


def mixed_items(mixing: Mixing, orders: Sequence[Index], rows: Sequence[Index]) -> Index:
    """The items of an epoch, as positions in the concatenated datasets.

    Args:
        mixing: how the datasets are mixed.
        orders: for each dataset, its rows in order.
        rows: for each dataset, the row of each of its items, ascending. A row may have no item
            or several.
    """
    which, places = mixed(mixing, [len(order) for order in orders])
    starts = np.cumsum([0, *(len(each) for each in rows)])
    first, last = np.empty(len(which), np.int64), np.empty(len(which), np.int64)
    for number, (order, of_items) in enumerate(zip(orders, rows, strict=True)):
        here = which == number
        wanted = order[places[here]]
        first[here] = starts[number] + np.searchsorted(of_items, wanted, "left")
        last[here] = starts[number] + np.searchsorted(of_items, wanted, "right")
    counts = last - first
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(int(counts.sum()))


def mixed_rows(
    mixing: Mixing, entries: Sequence[DatasetEntry], section: DataSection
) -> Iterator[Example | BrokenRow]:
    """The same order for datasets of unknown length: their rows, of which few are in memory."""
    sources = [_Repeated(entry, section) for entry in entries]
    for block in mixing.draws(len(sources)):
        for number in block.tolist():
            source = sources[number]
            if mixing.repeats or not source.is_done:
                yield source.take()
            if mixing.probabilities is not None and _is_at_end(mixing, sources):
                return
        if _is_at_end(mixing, sources):
            return


def _is_at_end(mixing: Mixing, sources: Sequence[_Repeated]) -> bool:
    return mixing.is_at_end([source.is_done for source in sources], [1] * len(sources))


class _Repeated:
    """The rows of a dataset, again and again. One row is read ahead, so that the end is known."""

    def __init__(self, entry: DatasetEntry, section: DataSection) -> None:
        self._entry, self._section = entry, section
        self.is_done = False  # whether each row was taken
        self._rows = read_rows(self._entry, self._section)
        self._next = next(self._rows)  # a dataset without rows is an error

    def take(self) -> Example | BrokenRow:
        """The next row."""
        row, following = self._next, next(self._rows, None)
        if following is None:
            self.is_done, self._rows = True, read_rows(self._entry, self._section)
            following = next(self._rows)
        self._next = following
        if isinstance(row, BrokenRow):
            return replace(row, reason=f"of {self._entry.name!r}: {row.reason}")
        return row
