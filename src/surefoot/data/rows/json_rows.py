"""Rows of JSON files: one object per line, or one long list that is never completely in memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from ...errors import DataError
from .formats.fields import Row, shown

Line = Row | str  # what a reader yields: a row, or the reason why there is none
CHUNK = 1 << 20  # characters that are read at a time
BOM = b"\xef\xbb\xbf"  # some editors put it in front of UTF-8 text
HUGE = "row {}: an integer of thousands of digits"
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
TOKEN = 32  # longer than any JSON token but a string or number
WORD = re.compile(r"[^ \t\r\n]")  # what is not white space in JSON


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of every line that is not blank, without byte order mark and line end."""
    check_encoding(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise not_utf8(path, f"line {number}", error) from None
            if text.strip():
                yield number, text.rstrip("\r\n")


def read_jsonl(path: Path) -> Iterator[Line]:
    """One object per line. An invalid line, such as an incomplete last one, is a broken row."""
    for count, (number, line) in enumerate(text_lines(path)):
        if not count and line.lstrip().startswith("["):
            hint = "a list of rows belongs into a .json file: rename it"
            raise DataError(f"{path}: expected one object per line, got a list; {hint}")
        try:
            yield _object(json.loads(line), f"line {number}")
        except (ValueError, RecursionError) as error:
            is_python = line.lstrip().startswith("{'")
            hint = "; a Python dict? write rows with json.dumps" if is_python else ""
            yield f"line {number} is not valid JSON ({error}){hint}"


def read_json(path: Path) -> Iterator[Line]:
    """A list of objects; or one object per line, since some tools name such files .json too."""
    with path.open("rb") as file:
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
    with path.open("rb") as file:
        start = file.read(64)
    text = start.removeprefix(BOM).lstrip()
    own = {".parquet": b"PAR1", ".arrow": b"ARROW1", ".txt": b"<"}.get(path.suffix.lower(), b"\0")
    for mark, kind in KINDS.items():
        is_that = text.lower().startswith(mark) if mark[:1] == b"<" else start.startswith(mark)
        if is_that and not mark.startswith(own):
            raise DataError(f"{path}: is {kind}")
    return start


def check_encoding(path: Path) -> None:
    """Raises ``DataError``: the file is no text, or the text is UTF-16 or UTF-32 that decodes as
    UTF-8, with NULs."""
    kind = NULS.get(tuple(byte == 0 for byte in check_kind(path)[:4]))
    if kind is not None:
        raise DataError(f"{path}: line 1: NUL bytes beside every letter; {_convert(kind)}")


def not_utf8(path: Path, where: str, error: UnicodeDecodeError) -> DataError:
    """The error for a text file in another encoding."""
    found = error.object[error.start]
    with path.open("rb") as file:
        start = file.read(4)
    kind = next((MARKS[mark] for mark in MARKS if start.startswith(mark)), "ISO-8859-1")
    return DataError(f"{path}: {where}: byte 0x{found:02x} is not UTF-8 text; {_convert(kind)}")


def _convert(kind: str) -> str:
    return f"convert it, for example with: iconv -f {kind} -t UTF-8"


def _read_list(path: Path) -> Iterator[Line]:
    check_encoding(path)
    with path.open(encoding="utf-8-sig") as file:
        window = _Window(file, path)
        window.take("[", "expected a list of rows")
        number, mark = 0, window.peek()
        while mark != "]":
            number += 1
            value = window.value()
            yield HUGE.format(number) if window.has_huge else _object(value, f"row {number}")
            mark = window.take(",]", "expected ',' or ']' after a row")
        if not number:
            window.take("]", "")
        if window.peek():
            raise window.error("expected nothing after the list")


class _Window:
    """A text buffer that slides over a file, to parse JSON values from front to back."""

    def __init__(self, file: TextIO, path: Path) -> None:
        self._file, self._path = file, path
        self._text, self._at, self._line = "", 0, 1
        self._decode = json.JSONDecoder(parse_int=self._integer).raw_decode
        self.has_huge = False  # whether the latest value has an integer that Python cannot read

    def peek(self) -> str:
        """The next character that is no white space; nothing at the end of the file."""
        while True:
            rest = WORD.search(self._text, self._at)
            self._at = rest.start() if rest else len(self._text)
            if rest or not self._slide(CHUNK):
                return self._text[self._at : self._at + 1]

    def take(self, marks: str, complaint: str) -> str:
        """Skip one of ``marks``, which must come next, and return it."""
        found = self.peek()
        if not found or found not in marks:
            raise self.error(complaint)
        self._at += 1
        return found

    def value(self) -> object:
        """The next value. An invalid value may only be incomplete in the buffer: read more."""
        self.peek()
        size = CHUNK
        while True:
            self.has_huge = False
            try:
                value, end = self._decode(self._text, self._at)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or error.pos > len(self._text) - TOKEN
                if not is_cut or not self._slide(size):
                    self._at = error.pos
                    raise self.error(error.msg) from None
            except RecursionError:
                raise self.error("too many nested brackets") from None
            else:
                if end < len(self._text) or not self._slide(size):
                    self._at = end
                    return value
            size *= 2  # so that a value of n characters is tried log(n) times, not n

    def _integer(self, digits: str) -> int:
        try:
            return int(digits)
        except ValueError:
            self.has_huge = True
            return 0

    def error(self, reason: str) -> DataError:
        """The error at the current position."""
        line = self._line + self._text.count("\n", 0, self._at)
        return DataError(f"{self._path}: not valid JSON at line {line}: {reason}")

    def _slide(self, size: int) -> bool:
        """Drop what was parsed and read more; False at the end of the file."""
        try:
            chunk = self._file.read(size)
        except UnicodeDecodeError as error:
            raise not_utf8(self._path, "the file", error) from None
        if chunk:
            self._line += self._text.count("\n", 0, self._at)
            self._text, self._at = self._text[self._at :] + chunk, 0
        return bool(chunk)


def _object(value: object, where: str) -> Line:
    return value if isinstance(value, dict) else f"{where}: expected an object, got {shown(value)}"
