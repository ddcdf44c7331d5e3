"""Readers of each kind of file: one generator of rows each.

CSV is read as text by Python's own module: a reader that infers types would turn 007 into 7.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...errors import DataError, counted
from .formats.fields import Row
from .formats.nulls import Struct
from .json_rows import Line, check_encoding, check_kind, not_utf8, read_json, read_jsonl, text_lines

if TYPE_CHECKING:
    import pyarrow as pa

BLANK_LINES = re.compile(r"\n[ \t]*\n\s*")
MOST_NAMES = 1 << 20  # characters of the names of the columns of a csv file
TextUnit = Literal["file", "paragraph", "line"]
ROWS = 1000  # rows of a columnar file that are Python objects at a time


def read_txt(path: Path, unit: TextUnit = "file") -> Iterator[Line]:
    """One row, ``{"text": ...}``, per file, per paragraph (blank lines are between them), or per
    line."""
    if unit == "line":
        for _, line in text_lines(path):
            yield {"text": line}
        return
    check_encoding(path)
    try:
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise not_utf8(path, "the file", error) from None
    for part in BLANK_LINES.split(text) if unit == "paragraph" else [text]:
        if part.strip():
            yield {"text": part.strip("\n")}


def read_csv(path: Path) -> Iterator[Line]:
    """One row per record, with the column names from the first one; all values are text. Values
    are separated by what separates the names: commas, or else semicolons or tabs."""
    check_encoding(path)
    csv.field_size_limit(2**31 - 1)  # the default refuses texts above 128 KiB
    with path.open(encoding="utf-8-sig", newline="") as file:
        records = csv.reader(file, strict=True, delimiter=_delimiter(path))
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


def _delimiter(path: Path) -> str:
    """What separates the names in the first line."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        line = file.readline(MOST_NAMES)
    counts = {each: len(next(csv.reader([line], delimiter=each), [])) for each in ",;\t"}
    return "," if counts[","] > 1 else max(counts, key=lambda each: counts[each])


def read_parquet(path: Path) -> Iterator[Line]:
    """The rows of a Parquet file, in groups."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_kind(path)
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS):
                yield from rows_of(batch)
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a complete Parquet file ({error})") from error


def read_arrow(path: Path) -> Iterator[Line]:
    """The rows of an Arrow file, in its indexed or its streaming form."""
    import pyarrow as pa

    check_kind(path)
    try:
        with pa.memory_map(str(path)) as file:
            is_indexed = file.read(6) == b"ARROW1"
            file.seek(0)
            reader = pa.ipc.open_file(file) if is_indexed else pa.ipc.open_stream(file)
            batches = _indexed(reader) if is_indexed else reader
            for batch in batches:
                for start in range(0, batch.num_rows, ROWS):
                    yield from rows_of(batch.slice(start, ROWS))
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a complete Arrow file ({error})") from error


def rows_of(batch: pa.RecordBatch) -> Iterator[Row]:
    """The rows of a batch: texts of the type Json as what they say, structures as ``Struct``."""
    converters = {field.name: _converter(field.type) for field in batch.schema}
    odd = {name: convert for name, convert in converters.items() if convert is not None}
    for row in batch.to_pylist():
        yield {**row, **{name: convert(row[name]) for name, convert in odd.items()}}


def _converter(kind: pa.DataType) -> Callable[[Any], object] | None:
    """What makes a value of a type from what Arrow gives; None if it is that."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name == "arrow.json":  # of ``datasets`` 4.8 and later, among others
            return lambda value: None if value is None else json.loads(value)
        return _converter(kind.storage_type)
    if pa.types.is_struct(kind):
        inner = {field.name: _converter(field.type) or _same for field in kind}
        return lambda value: (
            None if value is None else Struct({n: inner[n](each) for n, each in value.items()})
        )
    if pa.types.is_map(kind):
        item = _converter(kind.item_type) or _same
        return lambda value: None if value is None else {n: item(each) for n, each in value}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        of_item = _converter(kind.value_type)
        if of_item is not None:
            return lambda value: None if value is None else [of_item(each) for each in value]
    return None


def _same(value: object) -> object:
    return value


def _indexed(reader: pa.ipc.RecordBatchFileReader) -> Iterator[pa.RecordBatch]:
    return (reader.get_batch(i) for i in range(reader.num_record_batches))


READERS: dict[str, Callable[[Path], Iterator[Line]]] = {
    ".json": read_json,
    ".jsonl": read_jsonl,
    ".csv": read_csv,
    ".parquet": read_parquet,
    ".tsv": read_csv,
    ".txt": read_txt,
    ".arrow": read_arrow,
}
