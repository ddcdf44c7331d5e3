"""Readers of each kind of file: one generator of rows each.

CSV is read as text by Python's own module: a reader that infers types would turn 007 into 7.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import DataError, counted
from .json_rows import Line, check_encoding, not_utf8, read_json, read_jsonl, text_lines

if TYPE_CHECKING:
    import pyarrow as pa

ROWS = 1000  # rows of a columnar file that are Python objects at a time


def read_txt(path: Path) -> Iterator[Line]:
    """One row per line, ``{"text": line}``; blank lines are ignored."""
    for _, line in text_lines(path):
        yield {"text": line}


def read_csv(path: Path) -> Iterator[Line]:
    """One row per record, with the column names from the first one; all values are text."""
    check_encoding(path)
    csv.field_size_limit(2**31 - 1)  # the default refuses texts above 128 KiB
    with path.open(encoding="utf-8-sig", newline="") as file:
        records = csv.reader(file, strict=True)
        try:
            names = next(records, [])
            for record in filter(None, records):
                if len(record) == len(names):
                    yield dict(zip(names, record, strict=True))
                else:
                    found = f"{counted(len(record), 'value')} under {counted(len(names), 'name')}"
                    yield f"line {records.line_num} has {found}"
        except UnicodeDecodeError as error:
            raise not_utf8(path, f"after line {records.line_num}", error) from None
        except csv.Error as error:
            raise DataError(f"{path}: not valid CSV at line {records.line_num}: {error}") from None


def read_parquet(path: Path) -> Iterator[Line]:
    """The rows of a Parquet file, in groups."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS):
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a complete Parquet file ({error})") from error


def read_arrow(path: Path) -> Iterator[Line]:
    """The rows of an Arrow file, in its indexed or its streaming form."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as file:
            is_indexed = file.read(6) == b"ARROW1"
            file.seek(0)
            reader = pa.ipc.open_file(file) if is_indexed else pa.ipc.open_stream(file)
            batches = _indexed(reader) if is_indexed else reader
            for batch in batches:
                for start in range(0, batch.num_rows, ROWS):
                    yield from batch.slice(start, ROWS).to_pylist()
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a complete Arrow file ({error})") from error


def _indexed(reader: pa.ipc.RecordBatchFileReader) -> Iterator[pa.RecordBatch]:
    return (reader.get_batch(i) for i in range(reader.num_record_batches))


READERS: dict[str, Callable[[Path], Iterator[Line]]] = {
    ".json": read_json,
    ".jsonl": read_jsonl,
    ".csv": read_csv,
    ".parquet": read_parquet,
    ".txt": read_txt,
    ".arrow": read_arrow,
}
