"""Counts of the rows of each dataset: used, broken, dropped and truncated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import counted
from ..example import JSON
from .row_sources import BrokenRow

SHOWN = 3  # broken rows that are shown
SUMMED = ("rows", "broken", "cut", "items", "tokens", "trained_tokens")


@dataclass(frozen=True, kw_only=True)
class DatasetReport:
    """The counts of one dataset."""

    name: str
    rows: int = 0  # that were read
    broken: tuple[BrokenRow, ...] = ()  # that could not be read
    # reason -> how many examples gave nothing to learn
    dropped: Mapping[str, int] = field(default_factory=dict)
    cut: int = 0  # examples that lost a part to cutoff_len
    items: int = 0  # encoded examples, or pieces of long texts
    tokens: int = 0
    trained_tokens: int = 0  # that carry a label
    unread: tuple[str, ...] = ()  # columns that nothing reads, see ``meaningful_columns``
    remarks: tuple[str, ...] = ()  # on how its source is read
    notes: Mapping[str, int] = field(default_factory=dict)  # note -> how many examples have it

    def lines(self) -> Iterator[str]:
        """The report as text."""
        rows, examples = counted(self.rows, "row"), counted(self.items, "example")
        tokens = f"{counted(self.tokens, 'token')}, {self.trained_tokens:,} trained"
        yield f"{self.name}: {rows}, {examples}, {tokens}"
        for remark in self.remarks:
            yield f"{self.name}: {remark}"
        if self.broken:
            yield f"{self.name}: broken rows: {len(self.broken):,}"
            yield from shown(self.broken)
        for reason, count in self.dropped.items():
            yield f"{self.name}: examples dropped: {count:,} ({reason})"
        if self.unread:
            yield f"{self.name}: columns that nothing reads: {', '.join(self.unread)}"
        for note, count in self.notes.items():
            yield f"{self.name}: {counted(count, 'example')}: {note}"
        if self.cut:
            yield f"{self.name}: examples truncated to data.cutoff_len: {self.cut:,}"


@dataclass(frozen=True)
class EncodingReport:
    """The counts of all datasets of a recipe."""

    datasets: tuple[DatasetReport, ...]
    held_out: int = 0  # examples that val_size took from the training data

    def lines(self) -> Iterator[str]:
        """The report as text."""
        for dataset in self.datasets:
            yield from dataset.lines()
        if self.held_out:
            yield f"examples held out for evaluation: {self.held_out:,}"


def report_from(saved: JSON, name: str, remarks: tuple[str, ...] = ()) -> DatasetReport:
    """The report stored in a folder of the cache, with the dataset's current name."""
    fields: dict[str, Any] = dict(saved)
    broken = tuple(BrokenRow(**row) for row in fields["broken"])
    unread = tuple(fields.get("unread", ()))
    return DatasetReport(
        **{**fields, "broken": broken, "unread": unread, "name": name, "remarks": remarks}
    )


def add(one: DatasetReport, more: DatasetReport) -> DatasetReport:
    """The report of two consecutive parts of a dataset."""
    sums = {name: getattr(one, name) + getattr(more, name) for name in SUMMED}
    for name in ("dropped", "notes"):
        counts = Counter(getattr(one, name)) + Counter(getattr(more, name))
        sums[name] = dict(counts.most_common())
    unread = tuple(dict.fromkeys((*one.unread, *more.unread)))
    return replace(one, **sums, unread=unread, remarks=one.remarks or more.remarks)


def shown(broken: Sequence[BrokenRow]) -> Iterator[str]:
    """A line for each of the first broken rows."""
    for row in broken[:SHOWN]:
        yield f"  row {row.index}: {row.reason}"
