"""Every kind of file gives the rows that were written into it."""

import csv
import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.data.rows import _readers as readers
from surefoot.data.rows._readers import read_arrow, read_csv, read_parquet, read_txt
from surefoot.errors import DataError

ROWS = [
    {"messages": [{"role": "user", "content": "Grüße 🙂"}], "label": True, "note": None},
    {"messages": [{"role": "user", "content": "a"}] * 2, "label": False, "note": "n"},
]
VALUE = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@given(rows=st.lists(st.lists(VALUE, min_size=2, max_size=2), max_size=5))
def test_csv_is_read_as_it_was_written_and_all_values_are_text(folder, rows):
    text = io.StringIO(newline="")
    csv.writer(text).writerows([["id", "text"], *rows])
    path = folder / "a.csv"
    path.write_bytes(text.getvalue().encode())
    assert list(read_csv(path)) == [{"id": a, "text": b} for a, b in rows]


WIDTHS = [{"a": "1", "b": "2"}, "line 4 has 1 value under 2 names"]
WIDTHS += ["line 6 has 3 values under 2 names", {"a": "7", "b": "8"}]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("\ufeffid,text\n007," + "x" * 300_000 + "\n", [{"id": "007", "text": "x" * 300_000}]),
        ('a,b\n1,2\n"3\n3"\n\n4,5,6\n7,8\n', WIDTHS),
        ("", []),
        ("a,b\n", []),
    ],
    ids=["numbers and long texts", "records of another width", "empty", "names alone"],
)
def test_csv_values_stay_what_they_are_and_records_of_another_width_are_broken(folder, text, rows):
    (folder / "b.csv").write_text(text, encoding="utf-8")
    assert list(read_csv(folder / "b.csv")) == rows


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'a,b\n1,"2\n', r"e.csv: not valid CSV at line 2: unexpected end of data"),
        ("a\né\n".encode("latin-1"), r"e.csv: line 2: byte 0xe9 is not UTF-8 text"),
        ("é\n1\n".encode("latin-1"), r"e.csv: line 1: byte 0xe9 is not UTF-8 text"),
        (("a\n" + "b\n" * 9999 + "é\n").encode("latin-1"), r"e.csv: line 10001: byte 0xe9"),
    ],
)
def test_csv_with_an_open_quote_or_in_another_encoding_is_refused(folder, content, reason):
    (folder / "e.csv").write_bytes(content)
    with pytest.raises(DataError, match=reason):
        list(read_csv(folder / "e.csv"))


def test_a_text_file_has_a_row_a_line(folder):
    path = folder / "a.txt"
    path.write_bytes("\ufeffone\r\n\n  two \n \nthree\u2028four".encode())
    assert [row["text"] for row in read_txt(path, "line")] == ["one", "  two ", "three\u2028four"]


@pytest.mark.parametrize("rows_at_a_time", [1, 1000])
def test_parquet_rows(folder, monkeypatch, rows_at_a_time):
    monkeypatch.setattr(readers, "ROWS", rows_at_a_time)
    path = folder / "a.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    assert list(read_parquet(path)) == ROWS


@pytest.mark.parametrize("rows_at_a_time", [1, 1000])
@pytest.mark.parametrize("make", [pa.ipc.new_file, pa.ipc.new_stream])
def test_arrow_rows(folder, monkeypatch, make, rows_at_a_time):
    monkeypatch.setattr(readers, "ROWS", rows_at_a_time)
    path, table = folder / "a.arrow", pa.Table.from_pylist(ROWS)
    with path.open("wb") as file, make(file, table.schema) as writer:
        writer.write_table(table)
        writer.write_table(table)
    assert list(read_arrow(path)) == ROWS * 2


@pytest.mark.parametrize(
    ("name", "read", "kind"),
    [("b.parquet", read_parquet, "Parquet"), ("b.arrow", read_arrow, "Arrow")],
)
@pytest.mark.parametrize("keep", [0, 10, -40])
def test_a_torn_columnar_file_is_refused(folder, name, read, kind, keep):
    path, table = folder / name, pa.Table.from_pylist(ROWS)
    if kind == "Parquet":
        pq.write_table(table, path)
    else:
        with path.open("wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=f"{name}: not a complete {kind} file"):
        list(read(path))
