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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path

from ...errors import DataError
from ...storage import files
from ..data_order import Index
from ..example import JSON
from ..rows.dataset_report import DatasetReport, add, report_from
from . import cache
from .cache import Cached, Writer
from .encoder import Encode, Encoder, Row, no_items_error

ROWS, TOKENS = 4096, 1 << 22  # a shard ends with one or the other
WHOLE = "whole.json"
MAX_WHOLE = 1 << 10  # bytes


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
        """A shard; None if it is missing or damaged. Damage that is noticed later is repaired."""
        return cache.find(self.folder, self._name(number), lambda _: self.repair(number))

    def repair(self, number: int) -> None:
        """Encode a shard again that is missing or damaged. Raises ``DataError`` as ``encoded``, and
        if the rows have changed since."""
        if self.rows.fingerprint() != self.fingerprint:
            raise DataError(
                f"{self.folder}: shard {number} is damaged, and cannot be encoded again: "
                f"{self.rows.source} has changed since; start the same command again"
            )
        next(islice(self.encoded(again=number), number, None), None)

    def counts(self) -> tuple[int, int | None] | None:
        """How many shards there are, and how many items if that is stored; None as long as one is
        missing."""
        if self.shard_rows is None:
            return 1, None
        with files.raising(DataError, "data.cache_dir"):
            try:
                with files.open_file(self.folder / WHOLE) as file:
                    found = json.loads(files.read_all(file, MAX_WHOLE))
                    return int(found["shards"]), int(found["items"])
            except (FileNotFoundError, KeyError, TypeError, ValueError):
                return None

    def encoded(self, again: int | None = None) -> Iterator[DatasetReport]:
        """Encode what is still missing; yields the report so far with every shard. All bytes of the
        shard ``again`` are checked, too. Raises ``DataError`` if rows are broken, the source
        changes meanwhile, or there are no trained tokens."""
        rows, number = _Rows(self.rows.read()), 0
        total = DatasetReport(name=self.rows.name, remarks=self.rows.remarks)

        def build(writer: Writer) -> JSON:
            encoder = Encoder(
                self.rows.name, self.encode, writer, first_row=total.rows, numbers=self.rows.numbers
            )
            tokens = None if self.shard_rows is None else TOKENS
            report = encoder.run(rows, max_rows=self.shard_rows, max_tokens=tokens)
            if self.rows.fingerprint() != self.fingerprint:
                raise DataError(
                    f"dataset {self.rows.name!r}: {self.rows.source} changed while it was read"
                )
            if not total.items + report.items and rows.is_at_end():
                raise no_items_error(add(total, report))
            return asdict(report)

        while (counts := self.counts()) is None or number < counts[0]:
            found = None if number == again else self.find(number)
            if found is None:
                rows.go_to(total.rows)
                if self.shard_rows is not None and rows.is_at_end():
                    break
                found = cache.load_or_build(
                    self.folder, self._name(number), build, is_checked=number == again
                )
            total, number = add(total, report_from(found.report, self.rows.name)), number + 1
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
