"""Encodes the rows of one dataset into a Writer, and counts what comes of them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ..batch import IGNORE_INDEX, Features
from ..errors import DataError
from .cache import Writer
from .encode import Cut, Dropped, Encoded
from .example import Example
from .report import DatasetReport
from .sources import BrokenRow

logger = logging.getLogger(__name__)

BATCH = 1000  # examples that are encoded together
REPORT_SECONDS = 10.0

Encode = Callable[[Sequence[Example]], list[Encoded]]
Row = Example | BrokenRow


@dataclass
class Encoder:
    """Encodes rows of the dataset ``name``, of which the first has the number ``first_row``."""

    name: str
    encode: Encode
    writer: Writer
    first_row: int = 0
    rows: int = 0
    cut: int = 0
    items: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    broken: list[BrokenRow] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    def run(
        self, rows: Iterator[Row], *, max_rows: int | None = None, max_tokens: int | None = None
    ) -> DatasetReport:
        """Encode all rows, or the next ones up to about a limit; what became of them."""
        start = told = time.monotonic()
        while batch := list(islice(rows, self._next_size(max_rows))):
            self._add(batch)
            if max_tokens is not None and self.tokens >= max_tokens:
                break
            if time.monotonic() - told > REPORT_SECONDS:
                told = time.monotonic()
                speed = self.tokens / (told - start)
                logger.info("encoding %s: %d rows, %.0f tokens/s", self.name, self.rows, speed)
        return self.report()

    def report(self) -> DatasetReport:
        """The figures so far."""
        return DatasetReport(
            name=self.name,
            rows=self.rows,
            broken=tuple(self.broken),
            dropped=dict(self.dropped.most_common()),
            cut=self.cut,
            items=self.items,
            tokens=self.tokens,
            trained_tokens=self.trained_tokens,
        )

    def _next_size(self, max_rows: int | None) -> int:
        return BATCH if max_rows is None else min(BATCH, max_rows - self.rows)

    def _add(self, batch: Sequence[Row]) -> None:
        numbered = list(enumerate(batch, self.first_row + self.rows))
        self.rows += len(batch)
        self.broken += [row for row in batch if isinstance(row, BrokenRow)]
        examples = [(i, row) for i, row in numbered if isinstance(row, Example)]
        outcomes = self.encode([example for _, example in examples])
        items: list[Features] = []
        rows: list[int] = []
        for (index, _), outcome in zip(examples, outcomes, strict=True):
            found = self._features(outcome)
            items += found
            rows += [index] * len(found)
        self.writer.add(items, rows)
        self._count(items)

    def _features(self, outcome: Encoded) -> Sequence[Features]:
        if isinstance(outcome, Dropped):
            self.dropped[outcome.reason] += 1
            return ()
        if isinstance(outcome, Cut):
            self.cut += 1
            return outcome.features
        return outcome

    def _count(self, items: Sequence[Features]) -> None:
        self.items += len(items)
        for item in items:
            for name, values in item.items():
                if name.endswith("input_ids"):
                    self.tokens += len(values)
                elif name.endswith("labels"):  # nothing predicts the first token
                    ignored = list(values[1:]).count(IGNORE_INDEX)
                    self.trained_tokens += max(len(values) - 1, 0) - ignored


def nothing_learnt(report: DatasetReport) -> DataError:
    """The error for a dataset that gives no items."""
    reasons = "; ".join(f"{reason} ({count:,})" for reason, count in report.dropped.items())
    return DataError(
        f"dataset {report.name!r}: none of its {report.rows:,} rows gives anything to learn: "
        f"{reasons or 'all are broken'}"
    )
