"""What became of the rows of each dataset: nothing is left out without being counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .sources import BrokenRow

SHOWN = 3  # broken rows that are shown


@dataclass(frozen=True, kw_only=True)
class DatasetReport:
    """The figures of one dataset."""

    name: str
    rows: int  # that were read
    broken: tuple[BrokenRow, ...]  # that could not be read
    dropped: Mapping[str, int]  # reason -> how many examples gave nothing to learn
    cut: int  # examples that lost a part to cutoff_len
    items: int  # encoded examples, or pieces of long texts
    tokens: int
    trained_tokens: int  # that carry a label

    def lines(self) -> Iterator[str]:
        """The report in words."""
        learnt = f"{self.tokens:,} tokens, {self.trained_tokens:,} of them to learn"
        yield f"{self.name}: {self.rows:,} rows, {self.items:,} examples, {learnt}"
        if self.broken:
            yield f"{self.name}: rows left out, for they cannot be read: {len(self.broken):,}"
            yield from shown(self.broken)
        for reason, count in self.dropped.items():
            yield f"{self.name}: examples dropped: {count:,} ({reason})"
        if self.cut:
            yield f"{self.name}: examples cut to data.cutoff_len: {self.cut:,}"


@dataclass(frozen=True)
class Report:
    """The figures of all datasets of a recipe."""

    datasets: tuple[DatasetReport, ...]
    held_out: int = 0  # examples that val_size took from the training data

    def lines(self) -> Iterator[str]:
        """The report in words."""
        for dataset in self.datasets:
            yield from dataset.lines()
        if self.held_out:
            yield f"examples held out for evaluation: {self.held_out:,}"


def shown(broken: Sequence[BrokenRow]) -> Iterator[str]:
    """A line for each of the first broken rows."""
    for row in broken[:SHOWN]:
        yield f"  row {row.index}: {row.reason}"
