"""Readers of each kind of file: one generator of rows each.

CSV is read as text by Python's own module: a reader that infers types would turn 007 into 7. A JSON
file has one object per line, or is one list, the text of which is in memory.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...errors import DataError, counted, first_line
from ...storage.files import open_stream
from .formats.fields import DECODER, Row, Struct, from_json, shown, unique_keys

if TYPE_CHECKING:
    import pyarrow as pa


BLANK_LINES = re.compile(r"\n[ \t]*\n\s*")
MOST_NAMES = 1 << 20  # characters of the names of the columns of a csv file
TextUnit = Literal["file", "paragraph", "line"]
ROWS = 1000  # rows of a columnar file that are Python objects at a time
Line = Row | str  # what a reader yields: a row, or the reason why there is none
CHUNK = 1 << 20  # characters that are read at a time
BOM = b"\xef\xbb\xbf"  # some editors put it in front of UTF-8 text
MARKS = {  # at the start of text in other encodings
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"\x00\x00\xfe\xff": "UTF-32",
}
# Where the first four bytes are 0: ASCII in such an encoding, without a mark.
NULS = {
    tuple(byte == 0 for byte in "ab".encode(kind)[:4]): kind
    for kind in ("UTF-16LE", "UTF-16BE", "UTF-32LE", "UTF-32BE")
}
_AGAIN = "; download the file itself"
KINDS = {  # by the first bytes, and what to do about it
    b"version https://git-lfs": "a pointer of Git LFS, not the file itself; get it: git lfs pull",
    b"<!doctype": f"a page of HTML, such as that of a sign-in or an error{_AGAIN}",
    b"<html": f"a page of HTML, such as that of a sign-in or an error{_AGAIN}",
    b"<?xml": f"XML, such as the error of a server{_AGAIN}",
    b"\x1f\x8b": "compressed by gzip; add .gz to its name and unpack it: gunzip",
    b"(\xb5/\xfd": "compressed by Zstandard; add .zst to its name and unpack it: unzstd",
    b"BZh": "compressed by bzip2; add .bz2 to its name and unpack it: bunzip2",
    b"PK\x03\x04": "a ZIP archive or a sheet of Excel; unpack it, or save it as CSV",
    b"%PDF-": "a PDF; write its text into a file",
    b"PAR1": "a Parquet file; end its name in .parquet",
    b"ARROW1": "an Arrow file; end its name in .arrow",
    b"SQLite format 3": "an SQLite database; write its rows into a file",
}
SPACE = re.compile(r"[ \t\r\n]*")  # of JSON


def read_txt(path: Path, unit: TextUnit = "file") -> Iterator[Line]:
    """One row, ``{"text": ...}``, per file, per paragraph (blank lines are between them), or per
    line."""
    if unit == "line":
        for _, line in text_lines(path):
            yield {"text": line}
        return
    text = _text_of(path).replace("\r\n", "\n")
    for part in BLANK_LINES.split(text) if unit == "paragraph" else [text]:
        if part.strip():
            yield {"text": part.strip("\n")}


def read_csv(path: Path) -> Iterator[Line]:
    """One row per record, with the column names from the first one; all values are text. Values
    are separated by what separates the names: commas, or else semicolons or tabs."""
    check_encoding(path)
    csv.field_size_limit(2**31 - 1)  # the default refuses texts above 128 KiB
    with io.TextIOWrapper(open_stream(path), "utf-8-sig", newline="") as file:
        records = csv.reader(file, strict=True, delimiter=_delimiter(path))
        try:
            names = next(records, [])
            _refuse_twins(filter(None, names), path)  # some programs write columns without a name
            for record in filter(None, records):
                if len(record) == len(names):
                    yield dict(zip(names, record, strict=True))
                else:
                    sizes = counted(len(record), "value"), counted(len(names), "name")
                    yield f"line {records.line_num} has {sizes[0]} under {sizes[1]}"
        except UnicodeDecodeError:
            raise not_utf8(path) from None
        except csv.Error as error:
            raise DataError(f"{path}: not valid CSV at line {records.line_num}: {error}") from None


def _delimiter(path: Path) -> str:
    """What separates the names in the first line."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    with io.TextIOWrapper(open_stream(path), "utf-8-sig", "replace", newline="") as file:
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
            _refuse_twins(file.schema_arrow.names, path)
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
            count = reader.num_record_batches if is_indexed else 0
            _refuse_twins(reader.schema.names, path)
            for batch in map(reader.get_batch, range(count)) if is_indexed else reader:
                for start in range(0, batch.num_rows, ROWS):
                    yield from rows_of(batch.slice(start, ROWS))
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a complete Arrow file ({error})") from error


def _refuse_twins(names: Iterable[str], where: Path | str) -> None:
    """Raise ``DataError`` if a name occurs twice: of the values under it one would be lost."""
    twins = [name for name, count in Counter(names).items() if count > 1]
    if twins:
        raise DataError(f"{where}: the name {twins[0]!r} occurs twice; rename one of the two")


def rows_of(batch: pa.RecordBatch) -> Iterator[Line]:
    """The rows of a batch: texts of the type Json as what they say, structures as ``Struct``. One
    that cannot become Python objects is a broken row."""
    converters = {field.name: _converter(field.type) for field in batch.schema}
    odd = {name: convert for name, convert in converters.items() if convert is not None}
    try:
        rows: list[Row] | None = batch.to_pylist()
    except Exception:  # of one row, such as a time in the year 60000, or text that is no UTF-8
        rows = None
    for index in range(batch.num_rows):
        try:
            row = batch.slice(index, 1).to_pylist()[0] if rows is None else rows[index]
            yield {**row, **{name: convert(row[name]) for name, convert in odd.items()}}
        except DataError:
            raise
        except Exception as error:
            yield f"cannot be read ({type(error).__name__}: {first_line(error)})"


def _converter(kind: pa.DataType) -> Callable[[Any], object] | None:
    """What makes a value of a type from what Arrow gives; None if it is that."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name == "arrow.json":  # of ``datasets`` 4.8 and later, among others
            return lambda value: None if value is None else from_json(value, "a column of JSON")
        return _converter(kind.storage_type)
    if pa.types.is_struct(kind):
        _refuse_twins((field.name for field in kind), f"an object of the type {kind}")
        inner = {field.name: _converter(field.type) or _same for field in kind}
        return lambda value: (
            None if value is None else Struct({n: inner[n](each) for n, each in value.items()})
        )
    if pa.types.is_map(kind):
        item = _converter(kind.item_type) or _same
        return lambda value: (
            None if value is None else unique_keys([(n, item(each)) for n, each in value])
        )
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        of_item = _converter(kind.value_type)
        if of_item is not None:
            return lambda value: None if value is None else [of_item(each) for each in value]
    return None


def _same(value: object) -> object:
    return value


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of every line that is not blank, without byte order mark and line end."""
    check_encoding(path)
    with open_stream(path) as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise not_utf8(path) from None
            if text.strip():
                yield number, text.rstrip("\r\n")


def read_jsonl(path: Path) -> Iterator[Line]:
    """One object per line. An invalid line, such as an incomplete last one, is a broken row."""
    for count, (number, line) in enumerate(text_lines(path)):
        if not count and line.lstrip().startswith("["):
            hint = "a list of rows belongs into a .json file: rename it"
            raise DataError(f"{path}: expected one object per line, got a list; {hint}")
        try:
            yield _object(DECODER.decode(line), f"line {number}")
        except (ValueError, RecursionError) as error:
            is_python = line.lstrip().startswith("{'")
            hint = "; a Python dict? write rows with json.dumps" if is_python else ""
            yield f"line {number} is not valid JSON ({error}){hint}"


def read_json(path: Path) -> Iterator[Line]:
    """A list of objects; or one object per line, since some tools name such files .json too."""
    with open_stream(path) as file:
        start = file.read(3).removeprefix(BOM).lstrip()
        while not start and (more := file.read(CHUNK)):
            start = more.lstrip()
    if not start:
        return iter(())
    if not start.startswith(b"{"):
        return _read_list(path)
    number, line = next(text_lines(path))
    try:
        json.loads(line)
    except json.JSONDecodeError:
        if not line.lstrip().startswith("{'"):
            hint = "expected a list of rows, or one row a line"
            raise DataError(f"{path}: line {number} begins a single JSON object; {hint}") from None
    except (RecursionError, ValueError):  # such as a number of thousands of digits: a broken row
        pass
    return read_jsonl(path)  # which says what is wrong with each line


def check_kind(path: Path) -> bytes:
    """The first bytes of a file. Raises ``DataError``: by these it is another kind of file."""
    with open_stream(path) as file:
        start = file.read(64)
    text = start.removeprefix(BOM).lstrip()
    marks = {".parquet": b"PAR1", ".arrow": b"ARROW1", ".txt": b"<"}
    expected_mark = marks.get(path.suffix.lower(), b"\0")
    for mark, kind in KINDS.items():
        is_that = text.lower().startswith(mark) if mark[:1] == b"<" else start.startswith(mark)
        if is_that and not mark.startswith(expected_mark):
            raise DataError(f"{path}: is {kind}")
    return start


def check_encoding(path: Path) -> None:
    """Raises ``DataError``: the file is no text, or the text is UTF-16 or UTF-32 that decodes as
    UTF-8, with NULs."""
    kind = NULS.get(tuple(byte == 0 for byte in check_kind(path)[:4]))
    if kind is not None:
        raise DataError(f"{path}: line 1: NUL bytes beside every letter; {_convert(kind)}")


def _text_of(path: Path, size: int = -1) -> str:
    """The text of the first ``size`` bytes of a file, or of all of it."""
    check_encoding(path)
    with open_stream(path) as file:
        data = file.read(size)
    try:
        # a character that ``size`` cuts through is left out
        return codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=size < 0)
    except UnicodeDecodeError:
        raise not_utf8(path) from None


def not_utf8(path: Path) -> DataError:
    """The error for a text file in another encoding, with the first line that is not UTF-8: readers
    that read ahead have seen lines before it alone."""
    where, kind = "it", "ISO-8859-1"
    with open_stream(path) as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                kind = next((MARKS[mark] for mark in MARKS if line.startswith(mark)), kind)
            try:
                line.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                where = f"line {number}: byte 0x{error.object[error.start]:02x}"
                break
    return DataError(f"{path}: {where} is not UTF-8 text; {_convert(kind)}")


def _convert(kind: str) -> str:
    return f"convert it, for example with: iconv -f {kind} -t UTF-8"


def _read_list(path: Path) -> Iterator[Line]:
    """The text is in memory. Its rows are parsed one by one, since as objects they would take
    several times as much. Who only looks at the first rows, as for their format, has the text of
    the beginning: a dataset that is in the cache opened in 0.11 s, 0.08 of them to decode 15 MB."""
    text, is_whole = _text_of(path, CHUNK), path.stat().st_size <= CHUNK
    if is_whole or not text.strip(" \t\r\n["):  # of which not even a row begins in it
        text, is_whole = _text_of(path), True
    decode, number = DECODER.raw_decode, 0

    def behind(at: int, marks: str, complaint: str) -> int:
        """The place behind the next character, which must be one of ``marks``."""
        at = _next(text, at)
        if at == len(text) or text[at] not in marks:
            raise json.JSONDecodeError(complaint, text, at)
        return at + 1

    try:
        at = behind(0, "[", "expected a list of rows")
        is_empty = text.startswith("]", _next(text, at))
        while text[at - 1] != "]" and not is_empty:
            try:
                value, end = decode(text, _next(text, at))
                end = behind(end, ",]", "expected ',' or ']' after a row")
            except ValueError:
                if is_whole:
                    raise
                text, is_whole = _text_of(path), True  # the row may go on behind the beginning
                continue
            number, at = number + 1, end
            yield _object(value, f"row {number}")
        text = text if is_whole else _text_of(path)
        at = behind(at, "]", "") if is_empty else at
        if (rest := _next(text, at)) < len(text):
            raise json.JSONDecodeError("expected nothing after the list", text, rest)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: not valid JSON at line {error.lineno}: {error.msg}") from None
    except RecursionError:
        raise DataError(f"{path}: row {number + 1}: too many nested brackets") from None
    except ValueError as error:  # an integer of thousands of digits
        raise DataError(f"{path}: row {number + 1}: {error}") from None


def _next(text: str, at: int) -> int:
    """The place of the next character that is no white space."""
    space = SPACE.match(text, at)
    return space.end() if space else at


def _object(value: object, where: str) -> Line:
    return value if isinstance(value, dict) else f"{where}: expected an object, got {shown(value)}"


READERS: dict[str, Callable[[Path], Iterator[Line]]] = {
    ".json": read_json,
    ".jsonl": read_jsonl,
    ".csv": read_csv,
    ".parquet": read_parquet,
    ".tsv": read_csv,
    ".txt": read_txt,
    ".arrow": read_arrow,
}
