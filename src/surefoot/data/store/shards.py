"""A dataset that is encoded shard by shard: every shard can be read as soon as it is written.

A shard is a folder of the cache. The items of all shards, in order, are those of all rows. After an
interruption, encoding resumes with the first missing shard.

    <fingerprint>.shards/00000000/    the first rows, in the form that ``cache`` describes
    <fingerprint>.shards/00000001/    the rows after those
    <fingerprint>.shards/whole.json   how many shards and items there are; written last
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path

from ...errors import DataError
from ...storage import files
from ..example import JSON
from ..rows.dataset_report import DatasetReport, add, report_from
from ..rows.registry import DatasetEntry
from ..rows.rows import read_examples
from ..section import DataSection
from . import cache
from .cache import Cached, Writer, load_or_build
from .checked_file import Repair
from .encoder import Encode, Encoder, Row, no_items_error

logger = logging.getLogger(__name__)

ROWS, TOKENS = 4096, 1 << 22  # a shard ends with one or the other
WHOLE = "whole.json"
MAX_WHOLE = 1 << 10  # bytes


@dataclass(frozen=True)
class CompleteDataset:
    """A dataset that is completely encoded."""

    shards: int
    items: int


@dataclass(frozen=True)
class RowSequence:
    """The rows of a dataset, or of several that are mixed."""

    name: str
    source: str  # where they are, for errors
    read: Callable[[], Iterator[Row]]  # from the beginning
    stamp: Callable[[], str]  # changes whenever the rows may have changed
    remarks: tuple[str, ...] = ()  # on how the source is read


def rows_of(
    entry: DatasetEntry, section: DataSection, key: Callable[[str], str] = str
) -> RowSequence:
    """The rows of one dataset; ``key`` makes its fingerprint of the stamp of its source."""

    def read() -> Iterator[Row]:
        limit = entry.limit(section.max_samples)
        return read_examples(entry, max_samples=limit, max_broken_rows=section.max_broken_rows)

    source = entry.source
    return RowSequence(entry.name, str(source), read, lambda: key(source.stamp()), source.remarks)


def find_shard(folder: Path, number: int, repair: Repair | None = None) -> Cached | None:
    """A shard of the dataset in ``folder``; None if it is missing or damaged. See ``cache.find``
    for ``repair``."""
    return cache.find(folder, _name(number), repair)


def encode_shard_again(rows: RowSequence, encode: Encode, folder: Path, number: int) -> None:
    """Replace a damaged shard. Raises ``DataError`` as ``encode_shards``."""
    damaged = folder / _name(number)
    if cache.remove_damaged(damaged):
        logger.warning("%s is damaged: encoding it again", damaged)
    next(islice(encode_shards(rows, encode, folder), number, None), None)


def read_whole(folder: Path) -> CompleteDataset | None:
    """The counts of the dataset in ``folder``; None as long as something is missing."""
    with files.raising(DataError, "data.cache_dir"):
        try:
            with files.open_file(folder / WHOLE) as file:
                return CompleteDataset(**json.loads(files.read_all(file, MAX_WHOLE)))
        except (FileNotFoundError, TypeError, ValueError):
            return None


def encode_shards(
    source: RowSequence, encode: Encode, folder: Path, *, shard_rows: int = ROWS
) -> Iterator[DatasetReport]:
    """Encode what is still missing of a dataset in ``folder``; yields the report so far with every
    shard. Raises ``DataError`` if rows are broken, the source changes meanwhile, or there are no
    trained tokens."""
    rows = _Rows(source.read())
    stamp, number, total = (
        source.stamp(),
        0,
        DatasetReport(name=source.name, remarks=source.remarks),
    )

    def build(writer: Writer) -> JSON:
        encoder = Encoder(source.name, encode, writer, first_row=total.rows)
        report = encoder.run(rows, max_rows=shard_rows, max_tokens=TOKENS)
        if source.stamp() != stamp:
            raise DataError(f"dataset {source.name!r}: {source.source} changed while it was read")
        return asdict(report)

    while (whole := read_whole(folder)) is None or number < whole.shards:
        found = find_shard(folder, number)
        if found is None:
            rows.go_to(total.rows)
            if rows.is_at_end():
                break
            found = load_or_build(folder, _name(number), build)
        total = add(total, report_from(found.report, source.name))
        number += 1
        yield total
    if not total.items:
        raise no_items_error(total)
    with files.raising(DataError, "data.cache_dir"):
        files.write_aside(
            folder / WHOLE, json.dumps(asdict(CompleteDataset(number, total.items))).encode()
        )


def _name(number: int) -> str:
    return f"{number:08d}"


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
