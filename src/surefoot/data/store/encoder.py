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
from ..data_order import Index
from ..encoded import Dropped, Encoded, Truncated, items_of
from ..example import Example
from ..rows.dataset_report import DatasetReport, add, shown
from ..rows.row_sources import BrokenRow
from .cache import Writer
from .dataset import num_tokens

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
    numbers: Index | None = None  # of the rows, if these are not all rows of the dataset
    report: DatasetReport = field(init=False)  # so far

    def __post_init__(self) -> None:
        self.report = DatasetReport(name=self.name)

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
                    count, speed = self.report.rows, self.report.tokens / (told - start)
                    logger.info("encoding %s: %d rows, %.0f tokens/s", self.name, count, speed)
        return self.report

    def _batches(
        self, rows: Iterator[Row], max_rows: int | None, max_tokens: int | None
    ) -> Iterator[Sequence[Row]]:
        """Rows that are encoded together, up to a limit."""
        left = max_rows
        while max_tokens is None or self.report.tokens < max_tokens:
            batch = list(islice(rows, BATCH if left is None else min(BATCH, left)))
            if not batch:
                return
            left = None if left is None else left - len(batch)
            yield batch

    def _outcomes(self, batch: Sequence[Row]) -> list[Encoded]:
        return self.encode([row for row in batch if isinstance(row, Example)])

    def _add(self, batch: Sequence[Row], outcomes: Sequence[Encoded]) -> None:
        start = self.first_row + self.report.rows
        numbers = [
            i if self.numbers is None else int(self.numbers[i])
            for i, row in enumerate(batch, start)
            if isinstance(row, Example)
        ]
        items: list[Features] = []
        rows: list[int] = []
        for index, outcome in zip(numbers, outcomes, strict=True):
            found = items_of(outcome)
            items += found
            rows += [index] * len(found)
        self.writer.add(items, rows)
        more = DatasetReport(
            name=self.name,
            rows=len(batch),
            broken=tuple(r for r in batch if isinstance(r, BrokenRow) and not r.is_dropped),
            dropped=Counter(
                each.reason
                for each in (*batch, *outcomes)
                if isinstance(each, Dropped) or (isinstance(each, BrokenRow) and each.is_dropped)
            ),
            cut=sum(isinstance(each, Truncated) for each in outcomes),
            items=len(items),
            tokens=sum(map(num_tokens, items)),
            trained_tokens=sum(map(_num_trained, items)),
            unread=unread_in(batch, items),
            notes=Counter(n for row in batch if isinstance(row, Example) for n in row.notes),
        )
        self.report = add(self.report, more)


def unread_in(rows: Iterable[Row], items: Iterable[Features]) -> tuple[str, ...]:
    """The columns of ``rows`` that nothing reads; none if their ``items`` keep complete rows."""
    if any("row" in item for item in items):
        return ()
    return tuple(dict.fromkeys(c for row in rows if isinstance(row, Example) for c in row.unread))


def _num_trained(item: Features) -> int:
    """Number of trained tokens of an item; nothing predicts the first token of a sequence."""
    every = [labels for name, labels in item.items() if name.endswith("labels")]
    firsts = sum(bool(labels) and labels[0] != IGNORE_INDEX for labels in every)
    return sum(len(labels) - labels.count(IGNORE_INDEX) for labels in every) - firsts


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
    dropped = report.dropped.items()
    reasons = "; ".join(f"{reason} ({counted(count, 'row')})" for reason, count in dropped)
    broken = "".join(f"\n{line}" for line in shown(report.broken))
    return DataError(
        f"dataset {report.name!r}: none of its {counted(report.rows, 'row')} has trained tokens: "
        f"{reasons or 'all are broken'}{broken}"
    )
