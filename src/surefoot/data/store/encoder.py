"""Encodes the rows of one dataset into a Writer, and counts the outcomes."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from ...batch import IGNORE_INDEX, Features
from ...errors import DataError, counted
from ..encoded import Dropped, Encoded, Truncated
from ..example import Example
from ..rows.dataset_report import DatasetReport
from ..rows.row_sources import BrokenRow
from .cache import Writer

logger = logging.getLogger(__name__)

BATCH = 256  # examples that are encoded together
AHEAD = 2  # batches that are under way: while one is in the Rust tokenizer, another is rendered
REPORT_SECONDS = 10.0

Encode = Callable[[Sequence[Example]], list[Encoded]]
Row = Example | BrokenRow
Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass
class Encoder:
    """Encodes rows of the dataset ``name``, the first of which has the number ``first_row``."""

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
        """Encode all rows, or the next ones up to about a limit; returns the report so far."""
        start = told = time.monotonic()
        with ThreadPoolExecutor(AHEAD) as pool:
            batches = self._batches(rows, max_rows, max_tokens)
            for batch, outcomes in _ahead(pool, self._outcomes, batches):
                self._add(batch, outcomes)
                if time.monotonic() - told > REPORT_SECONDS:
                    told = time.monotonic()
                    speed = self.tokens / (told - start)
                    logger.info("encoding %s: %d rows, %.0f tokens/s", self.name, self.rows, speed)
        return self.report()

    def report(self) -> DatasetReport:
        """The report so far."""
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

    def _batches(
        self, rows: Iterator[Row], max_rows: int | None, max_tokens: int | None
    ) -> Iterator[Sequence[Row]]:
        """Rows that are encoded together, up to a limit."""
        left = max_rows
        while max_tokens is None or self.tokens < max_tokens:
            batch = list(islice(rows, BATCH if left is None else min(BATCH, left)))
            if not batch:
                return
            left = None if left is None else left - len(batch)
            yield batch

    def _outcomes(self, batch: Sequence[Row]) -> list[Encoded]:
        return self.encode([row for row in batch if isinstance(row, Example)])

    def _add(self, batch: Sequence[Row], outcomes: Sequence[Encoded]) -> None:
        start = self.first_row + self.rows
        numbers = [i for i, row in enumerate(batch, start) if isinstance(row, Example)]
        self.rows += len(batch)
        self.broken += [row for row in batch if isinstance(row, BrokenRow)]
        items: list[Features] = []
        rows: list[int] = []
        for index, outcome in zip(numbers, outcomes, strict=True):
            found = self._features(outcome)
            items += found
            rows += [index] * len(found)
        self.writer.add(items, rows)
        self._count(items)

    def _features(self, outcome: Encoded) -> Sequence[Features]:
        if isinstance(outcome, Dropped):
            self.dropped[outcome.reason] += 1
            return ()
        if isinstance(outcome, Truncated):
            self.cut += 1
            return outcome.features
        return outcome

    def _count(self, items: Sequence[Features]) -> None:
        self.items += len(items)
        for name in items[0] if items else ():
            column = [item[name] for item in items]
            if name.endswith("input_ids"):
                self.tokens += sum(map(len, column))
            elif name.endswith("labels"):
                self.trained_tokens += sum(map(_num_trained, column))


def _num_trained(labels: Sequence[int]) -> int:
    """Number of trained tokens; nothing predicts the first token."""
    is_first = bool(labels) and labels[0] != IGNORE_INDEX
    return len(labels) - labels.count(IGNORE_INDEX) - is_first


def _ahead(
    pool: Executor, function: Callable[[Given], Made], given: Iterable[Given]
) -> Iterator[tuple[Given, Made]]:
    """Each of ``given`` and the result of ``function`` for it, in order; a few run ahead."""
    under_way: deque[tuple[Given, Future[Made]]] = deque()
    for each in given:
        under_way.append((each, pool.submit(function, each)))
        if len(under_way) > AHEAD:
            first, made = under_way.popleft()
            yield first, made.result()
    for each, made in under_way:
        yield each, made.result()


def no_items_error(report: DatasetReport) -> DataError:
    """The error for a dataset without items."""
    reasons = "; ".join(f"{reason} ({count:,})" for reason, count in report.dropped.items())
    return DataError(
        f"dataset {report.name!r}: none of its {counted(report.rows, 'row')} has trained tokens: "
        f"{reasons or 'all are broken'}"
    )
