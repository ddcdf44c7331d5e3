"""A dataset in the cache, shard by shard: every shard can be read as soon as it is written.

A shard is a folder of the cache. The items of all shards, in order, are those of all rows. After an
interruption, encoding resumes with the first missing shard. A dataset that is encoded before it is
read is one shard.

    <fingerprint>/                    all rows, in the form that ``cache`` describes
    <fingerprint>.shards/00000000/    the first rows, in the same form
    <fingerprint>.shards/00000001/    the rows after those
    <fingerprint>.shards/whole.json   how many shards and items there are; written last
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from ...batch import IGNORE_INDEX, Features
from ...errors import DataError, counted
from ...storage import files
from ..data_order import Index
from ..example import JSON, BrokenRow, Dropped, Encoded, Example, Truncated, items_of, unread_in
from ..rows._row_sources import first_broken
from . import cache
from .cache import Cached, Writer, num_tokens

ROWS, TOKENS = 4096, 1 << 22  # a shard ends with one or the other
WHOLE = "whole.json"
MAX_WHOLE = 1 << 10  # bytes

logger = logging.getLogger(__name__)

BATCH = 256  # examples that are encoded together
AHEAD = 2  # batches that are under way: while one is in the Rust tokenizer, another is rendered
REPORT_SECONDS = 10.0
Encode = Callable[[Sequence[Example]], list[Encoded]]
Row = Example | BrokenRow
Input = TypeVar("Input")
Result = TypeVar("Result")
SUMMED = ("rows", "broken", "cut", "items", "tokens", "trained_tokens")


@dataclass(frozen=True)
class RowSequence:
    """The rows of a dataset, or of several that are mixed."""

    name: str
    source: str  # where they are, for errors
    read: Callable[[], Iterator[Row]]  # from the beginning
    fingerprint: Callable[[], str]  # of all that the items depend on
    remarks: tuple[str, ...] = ()  # on how the source is read
    numbers: Index | None = None  # of the rows, if these are not all rows of the dataset


@dataclass(frozen=True)
class ShardedDataset:
    """Rows, what encodes them, and the place of their shards in the cache."""

    rows: RowSequence
    encode: Encode
    root: Path  # of the cache
    fingerprint: str  # of ``rows`` when they were opened
    shard_rows: int | None = None  # None: all rows are one shard

    @property
    def folder(self) -> Path:
        """The folder that contains the shards."""
        return self.root if self.shard_rows is None else self.root / f"{self.fingerprint}.shards"

    def find(self, number: int) -> Cached | None:
        """A shard; None if it is missing or damaged."""
        return cache.find(self.folder, self._name(number))

    def counts(self) -> tuple[int, int | None] | None:
        """How many shards there are, and how many items if that is stored; None as long as one is
        missing."""
        if self.shard_rows is None:
            return 1, None
        with files.raising(DataError, "data.cache_dir"):
            try:
                with files.open_file(self.folder / WHOLE) as file:
                    totals = json.loads(files.read_all(file, MAX_WHOLE))
                    return int(totals["shards"]), int(totals["items"])
            except (FileNotFoundError, KeyError, TypeError, ValueError):
                return None

    def encoded(self) -> Iterator[DatasetReport]:
        """Encode what is still missing; yields the report so far with every shard. Raises
        ``DataError`` if rows are broken, the source has changed since it was opened, or there are
        no trained tokens."""
        rows, number = _Rows(self.rows.read()), 0
        total = DatasetReport(name=self.rows.name, remarks=self.rows.remarks)

        def build(writer: Writer) -> JSON:
            encoder = Encoder(
                self.rows.name, self.encode, writer, first_row=total.rows, numbers=self.rows.numbers
            )
            tokens = None if self.shard_rows is None else TOKENS
            report = encoder.run(rows, max_rows=self.shard_rows, max_tokens=tokens)
            # A file that grows while it is encoded would be cached under the name of what it was.
            if self.rows.fingerprint() != self.fingerprint:
                raise DataError(
                    f"dataset {self.rows.name!r}: {self.rows.source} changed while it was read"
                )
            if not total.items + report.items and rows.is_at_end():
                raise no_items_error(add(total, report))
            return asdict(report)

        while (counts := self.counts()) is None or number < counts[0]:
            if (store := self.find(number)) is None:
                rows.go_to(total.rows)
                if self.shard_rows is not None and rows.is_at_end():
                    break
                store = cache.load_or_build(self.folder, self._name(number), build)
            total, number = add(total, report_from(store.report, self.rows.name)), number + 1
            yield total
        if self.shard_rows is not None:
            body = json.dumps({"shards": number, "items": total.items})
            with files.raising(DataError, "data.cache_dir"):
                files.write_aside(self.folder / WHOLE, body.encode())

    def _name(self, number: int) -> str:
        return self.fingerprint if self.shard_rows is None else f"{number:08d}"


class _Rows:
    """The rows of a dataset, and how many of them were read."""

    def __init__(self, rows: Iterator[Row]) -> None:
        self._rows, self._taken = rows, 0

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        row = next(self._rows)
        self._taken += 1
        return row

    def go_to(self, row: int) -> None:
        """Skip the rows before ``row``."""
        while self._taken < row and next(self, None) is not None:
            pass

    def is_at_end(self) -> bool:
        """Whether no row is left."""
        first = next(self._rows, None)
        if first is not None:
            self._rows = chain([first], self._rows)
        return first is None


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
        start = reported_at = time.monotonic()
        # Threads, as the Rust tokenizer lets go of the interpreter: on two cores, two processes
        # gave 0.98 of the rows per second of one, and each cost 2.7 CPU seconds to start
        # (decisions/0037).
        with ThreadPoolExecutor(AHEAD) as pool:
            batches = self._batches(rows, max_rows, max_tokens)
            for batch, outcomes in _ahead(pool, self._outcomes, batches):
                self._add(batch, outcomes)
                if time.monotonic() - reported_at > REPORT_SECONDS:
                    reported_at = time.monotonic()
                    count, speed = self.report.rows, self.report.tokens / (reported_at - start)
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
            row_items = items_of(outcome)
            items += row_items
            rows += [index] * len(row_items)
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


def _num_trained(item: Features) -> int:
    """Number of trained tokens of an item; nothing predicts the first token of a sequence."""
    every = [labels for name, labels in item.items() if name.endswith("labels")]
    firsts = sum(bool(labels) and labels[0] != IGNORE_INDEX for labels in every)
    return sum(len(labels) - labels.count(IGNORE_INDEX) for labels in every) - firsts


def _ahead(
    pool: Executor, function: Callable[[Input], Result], inputs: Iterable[Input]
) -> Iterator[tuple[Input, Result]]:
    """Each of ``inputs`` and the result of ``function`` for it, in order; a few run ahead."""
    under_way: deque[tuple[Input, Future[Result]]] = deque()
    for each in inputs:
        under_way.append((each, pool.submit(function, each)))
        if len(under_way) > AHEAD:
            first, future = under_way.popleft()
            yield first, future.result()
    for each, future in under_way:
        yield each, future.result()


def no_items_error(report: DatasetReport) -> DataError:
    """The error for a dataset without items."""
    dropped = report.dropped.items()
    reasons = "; ".join(f"{reason} ({counted(count, 'row')})" for reason, count in dropped)
    broken = "".join(f"\n{line}" for line in first_broken(report.broken))
    return DataError(
        f"dataset {report.name!r}: none of its {counted(report.rows, 'row')} has trained tokens: "
        f"{reasons or 'all are broken'}{broken}"
    )


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
            yield from first_broken(self.broken)
        for reason, count in self.dropped.items():
            yield f"{self.name}: examples dropped: {count:,} ({reason})"
        if self.unread:
            yield f"{self.name}: columns that nothing reads: {', '.join(self.unread)}"
        for note, count in self.notes.items():
            yield f"{self.name}: {counted(count, 'example')}: {note}"
        if self.cut:
            yield f"{self.name}: examples truncated to data.cutoff_len: {self.cut:,}"


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
