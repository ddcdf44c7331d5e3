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
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from ...batch import IGNORE_INDEX, Features
from ...errors import DataError, counted
from ...storage import files
from ...storage.child import Child
from ..data_order import Index
from ..example import (
    JSON,
    BrokenRow,
    Dropped,
    Encoded,
    Example,
    Truncated,
    items_of,
    unread_in,
    unread_line,
)
from ..media.files import MediaFiles
from ..media.stamps import first_changed
from ..rows._row_sources import first_broken
from . import cache
from ._shares import ALONE_SECONDS, Shares, num_shares
from .cache import Cached, EncodedStore, FlatLists, Writer, flattened

ROWS, TOKENS = 4096, 1 << 22  # a shard ends with one or the other
WHOLE = "whole.json"
MAX_WHOLE = 1 << 10  # bytes

logger = logging.getLogger(__name__)

BATCH = 256  # examples that are encoded together
# Batches that are under way beside the one that is waited for: while two of them are in the Rust
# tokenizer, the third is rendered. The ends of a stream's shards follow from this number.
AHEAD = 2
PARALLELISM = "TOKENIZERS_PARALLELISM"  # the environment variable that the Rust tokenizer reads
REPORT_SECONDS = 10.0
Encode = Callable[[Sequence[Example]], list[Encoded]]
Row = Example | BrokenRow
NumberedRows = tuple[int, Sequence[Row]]  # the number of the first one among the rows, and all
StartShare = Callable[[str, int, int], Child]  # by dataset; see ``Shares``
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
    start_share: StartShare | None = None  # the process of a share
    media: MediaFiles | None = None  # where its pictures are

    @property
    def folder(self) -> Path:
        """The folder that contains the shards."""
        return self.root if self.shard_rows is None else self.root / f"{self.fingerprint}.shards"

    def find(self, number: int) -> Cached | None:
        """A shard; None if it is missing or damaged, or a picture of it has changed."""
        return cache.find(self.folder, self._name(number), self._changed)

    def _changed(self, store: EncodedStore, began: float | None = None) -> str | None:
        return None if self.media is None else first_changed(self.media, store, began)

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
            encoder = self._encoder(total.rows)
            if self.shard_rows is None:
                with self._shares() or nullcontext() as shares:
                    report = encoder.run(rows, writer, shares=shares)
            else:
                report = encoder.run(rows, writer, max_rows=self.shard_rows, max_tokens=TOKENS)
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
                began, name = time.time(), self._name(number)
                store = cache.load_or_build(self.folder, name, build, self._changed)
                if store.is_new and (picture := self._changed(store.store, began)) is not None:
                    raise DataError(f"picture {picture} changed while it was read")
            total, number = add(total, report_from(store.report, self.rows.name)), number + 1
            yield total
        if self.shard_rows is not None:
            body = json.dumps({"shards": number, "items": total.items})
            with files.raising(DataError, "data.cache_dir"):
                files.write_aside(self.folder / WHOLE, body.encode())

    def encode_missing(self, number: int) -> Cached:
        """A shard, once all that is missing is encoded. Raises ``DataError``."""
        deque(self.encoded(), maxlen=0)
        if (cached := self.find(number)) is None:
            raise DataError(f"data.cache_dir: {self.folder} does not keep what is written to it")
        return cached

    def write_share(self, file: IO[bytes], first_row: int, number: int, count: int) -> None:
        """Encode every ``count``-th batch of the rows from ``first_row`` on, beginning with batch
        ``number``, for the ``Shares`` of another process."""
        rows = _Rows(self.rows.read())
        rows.go_to(first_row)
        for batch in self._encoder(first_row).share(rows, number, count):
            batch.write(file)
        file.write(b"{}\n")
        file.flush()

    def _encoder(self, first_row: int) -> Encoder:
        return Encoder(self.rows.name, self.encode, first_row, self.rows.numbers)

    def _shares(self) -> Shares | None:
        """Processes that encode, too, if there may be any."""
        if self.start_share is None:
            return None
        start = partial(self.start_share, self.rows.name)
        return Shares(start, self.rows.name, self.fingerprint, num_shares(), ALONE_SECONDS)

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
    first_row: int = 0
    numbers: Index | None = None  # of the rows, if these are not all rows of the dataset
    report: DatasetReport = field(init=False)  # so far

    def __post_init__(self) -> None:
        self.report = DatasetReport(name=self.name)
        self._started = self._reported = time.monotonic()

    def run(
        self,
        rows: _Rows,
        writer: Writer,
        *,
        max_rows: int | None = None,
        max_tokens: int | None = None,
        shares: Shares | None = None,
    ) -> DatasetReport:
        """Encode all rows, or the next ones up to about a limit; returns the report so far. With
        ``shares``, other processes encode what is left once they are ready."""
        # Threads, as the Rust tokenizer lets go of the interpreter: on two cores, two processes
        # gave 0.98 of the rows per second of one, and each cost 2.7 CPU seconds to start
        # (decisions/0037).
        with _tokenizer_without_threads(), ThreadPoolExecutor(AHEAD + 1) as pool:
            batches = self._batches(rows, max_rows, max_tokens, shares)
            for encoded in _ahead(pool, self.encoded, batches):
                self._add(encoded, writer)
        if shares is None or not shares.are_ready() or rows.is_at_end():
            return self.report
        for batch in shares.batches(self.first_row + self.report.rows, EncodedBatch.read):
            self._add(batch, writer)
        if not shares.is_done or not self.report.items:  # the caller asks for rows that are left
            rows.go_to(self.first_row + self.report.rows)
        return self.report if shares.is_done else self.run(rows, writer)

    def share(self, rows: _Rows, number: int, count: int) -> Iterator[EncodedBatch]:
        """Every ``count``-th batch of the rows, from batch ``number`` on."""
        batches = self._batches(rows, None, None, None)
        yield from map(self.encoded, islice(batches, number, None, count))

    def encoded(self, numbered: NumberedRows) -> EncodedBatch:
        """The items and the report of a batch of rows."""
        start, batch = numbered
        outcomes = self.encode([row for row in batch if isinstance(row, Example)])
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
        features = flattened(items)
        report = DatasetReport(
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
            tokens=sum(len(lists.flat) for lists in _named(features, "input_ids")),
            trained_tokens=sum(map(_num_trained, _named(features, "labels"))),
            unread=unread_in(batch, items),
            notes=Counter(n for row in batch if isinstance(row, Example) for n in row.notes),
        )
        return EncodedBatch(features, np.array(rows, np.int64), report)

    def _batches(
        self, rows: _Rows, max_rows: int | None, max_tokens: int | None, shares: Shares | None
    ) -> Iterator[NumberedRows]:
        """Rows that are encoded together, up to a limit, or until ``shares`` are ready."""
        left, start = max_rows, self.first_row + self.report.rows
        while max_tokens is None or self.report.tokens < max_tokens:
            if shares is not None and shares.are_ready():
                return
            batch = list(islice(rows, BATCH if left is None else min(BATCH, left)))
            if not batch:
                return
            left = None if left is None else left - len(batch)
            yield start, batch
            start += len(batch)

    def _add(self, encoded: EncodedBatch, writer: Writer) -> None:
        writer.append(encoded.features, encoded.rows)
        self.report = add(self.report, encoded.report)
        if time.monotonic() - self._reported > REPORT_SECONDS:
            self._reported = time.monotonic()
            speed = self.report.tokens / (self._reported - self._started)
            logger.info("encoding %s: %d rows, %.0f tokens/s", self.name, self.report.rows, speed)


def _named(features: Mapping[str, FlatLists], ending: str) -> list[FlatLists]:
    return [lists for name, lists in features.items() if name.endswith(ending)]


def _num_trained(labels: FlatLists) -> int:
    """Number of trained tokens; nothing predicts the first token of a sequence."""
    is_trained = labels.flat != IGNORE_INDEX
    firsts = (np.cumsum(labels.lengths) - labels.lengths)[labels.lengths > 0]
    return int(is_trained.sum() - is_trained[firsts].sum())


@contextmanager
def _tokenizer_without_threads() -> Iterator[None]:
    """The Rust tokenizer has no threads of its own inside, unless the environment says that it has:
    those of the pool keep two cores busy, and without others an encoding took a sixth less CPU
    (benchmarks/RESULTS.md)."""
    is_said = PARALLELISM in os.environ
    os.environ.setdefault(PARALLELISM, "false")
    try:
        yield
    finally:
        if not is_said:
            os.environ.pop(PARALLELISM, None)


def _ahead(
    pool: Executor, function: Callable[[Input], Result], inputs: Iterable[Input]
) -> Iterator[Result]:
    """The result of ``function`` for each of ``inputs``, in order; a few run ahead."""
    under_way: deque[Future[Result]] = deque()
    for each in inputs:
        under_way.append(pool.submit(function, each))
        if len(under_way) > AHEAD:
            yield under_way.popleft().result()
    for future in under_way:
        yield future.result()


@dataclass(frozen=True)
class EncodedBatch:
    """The items and the report of some rows in turn."""

    features: Mapping[str, FlatLists]
    rows: Index  # [items] the row that each item comes from
    report: DatasetReport  # of these rows

    def write(self, file: IO[bytes]) -> None:
        """Write it for ``read``: a line of JSON, and behind it the bytes of its arrays."""
        arrays = [("rows", self.rows)]
        for name, lists in self.features.items():
            arrays += [(name, lists.flat), (name, lists.lengths)]  # type: ignore[list-item]
        described = [[name, array.dtype.str, len(array)] for name, array in arrays]
        report = asdict(add(DatasetReport(name=self.report.name), self.report))
        file.write(json.dumps({"arrays": described, "report": report}).encode() + b"\n")
        for _, array in arrays:
            file.write(array.data)
        file.flush()

    @classmethod
    def read(cls, file: IO[bytes]) -> EncodedBatch | None:
        """The next one; None behind the last. Raises ``EOFError`` if what writes them has ended."""
        if not (line := file.readline()).endswith(b"\n"):
            raise EOFError
        if not (header := json.loads(line)):
            return None
        arrays = []
        for _, kind, length in header["arrays"]:
            data = file.read(length * np.dtype(kind).itemsize)
            if len(data) < length * np.dtype(kind).itemsize:
                raise EOFError
            arrays.append(np.frombuffer(data, kind))
        names = [name for name, _, _ in header["arrays"][1::2]]
        features = dict(zip(names, map(FlatLists, arrays[1::2], arrays[2::2]), strict=True))
        return cls(features, arrays[0], report_from(header["report"], header["report"]["name"]))


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
    unread: Mapping[str, Sequence[int]] = field(default_factory=dict)  # see ``unread_in``
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
            yield f"{self.name}: {unread_line(self.unread)}"
        for note, count in self.notes.items():
            yield f"{self.name}: {counted(count, 'example')}: {note}"
        if self.cut:
            yield f"{self.name}: examples truncated to data.cutoff_len: {self.cut:,}"


def report_from(saved: JSON, name: str, remarks: tuple[str, ...] = ()) -> DatasetReport:
    """The report stored in a folder of the cache, with the dataset's current name."""
    fields: dict[str, Any] = dict(saved)
    broken = tuple(BrokenRow(**row) for row in fields["broken"])
    return DatasetReport(**{**fields, "broken": broken, "name": name, "remarks": remarks})


def add(one: DatasetReport, more: DatasetReport) -> DatasetReport:
    """The report of two consecutive parts of a dataset."""
    sums = {name: getattr(one, name) + getattr(more, name) for name in SUMMED}
    for name in ("dropped", "notes"):
        counts = Counter(getattr(one, name)) + Counter(getattr(more, name))
        sums[name] = dict(counts.most_common())
    unread = dict(more.unread)
    unread |= {key: (n + unread.get(key, (0,))[0], first) for key, (n, first) in one.unread.items()}
    return replace(one, **sums, unread=unread, remarks=one.remarks or more.remarks)
