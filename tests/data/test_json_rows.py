"""JSON files row by row are the same as JSON files at once."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from surefoot.data.rows import _readers
from surefoot.data.rows._readers import READERS, read_json, read_jsonl
from surefoot.errors import DataError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
ROWS = st.lists(st.dictionaries(st.text(), VALUES, max_size=3), max_size=5)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("json") / "rows.json"


@pytest.fixture(scope="module", autouse=True, params=[3, _readers.CHUNK], ids=["of parts", ""])
def beginning(request):
    """The text is read in two parts, or at once."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch.setattr(_readers, "CHUNK", request.param)


def write(path, text):
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


@given(
    rows=ROWS,
    indent=st.sampled_from([None, 0, 3]),
    ascii_only=st.booleans(),
    space=st.sampled_from(["", " ", "\r\n\t", "\ufeff"]),
)
@example(rows=[{"a": 1}], indent=None, ascii_only=True, space="\ufeff")
def test_a_list_is_read_as_json_reads_it(path, rows, indent, ascii_only, space):
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    try:
        write(path, space + text + space.replace("\ufeff", ""))
        json.loads(path.read_bytes())
    except UnicodeError:
        return  # half a surrogate pair cannot be written
    assert list(read_json(path)) == rows


@given(rows=ROWS, part=st.floats(0, 1, exclude_max=True))
def test_a_list_that_is_torn_anywhere_is_an_error_never_fewer_rows(path, rows, part):
    text = json.dumps(rows)
    write(path, text[: 1 + int(part * (len(text) - 1))])
    with pytest.raises(DataError, match="not valid JSON at line 1"):
        list(read_json(path))


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ('[\n{"a": 1},\n{"a": 2', 3, "Expecting ',' delimiter"),
        ('[\n{"a": 1}\n{"a": 2}\n]', 3, "expected ',' or ']' after a row"),
        ('[\n{"a": 1},\n]', 3, "Expecting value"),
        ('[\n{"a": 1}\n]\n\nmore', 5, "expected nothing after the list"),
        ('\n\n"text"', 3, "expected a list of rows"),
    ],
)
def test_a_broken_list_says_on_which_line(path, text, line, reason):
    with pytest.raises(DataError) as caught:
        list(read_json(write(path, text)))
    assert f"at line {line}: {reason}" in str(caught.value)


def test_the_first_rows_of_a_list_are_read_without_the_rest(path, monkeypatch):
    monkeypatch.setattr(_readers, "CHUNK", 20)
    path.write_bytes(b'[{"a": 1}, {"a": 2}, \xff')
    rows = read_json(path)
    assert next(rows) == {"a": 1}
    with pytest.raises(DataError, match="byte 0xff is not UTF-8 text"):
        list(rows)


def test_a_list_of_other_things_has_broken_rows(path):
    rows = list(read_json(write(path, '[{"a": 1}, 2, null, [3]]')))
    assert rows[0] == {"a": 1}
    assert rows[1:] == [
        "row 2: expected an object, got int 2",
        "row 3: expected an object, got null",
        "row 4: expected an object, got list [3]",
    ]


def test_too_many_brackets_are_an_error_not_a_crash(path):
    with pytest.raises(DataError, match="brackets"):
        list(read_json(write(path, "[" * 200_000)))


def test_a_json_file_with_one_object_a_line_is_read_as_lines(path):
    assert list(read_json(write(path, '\n{"a": 1}\n{"a": 2}\n'))) == [{"a": 1}, {"a": 2}]
    first, second = read_json(write(path, '{"a":' * 100_000 + "\n" + '{"a": 2}\n'))
    assert "line 1" in first
    assert second == {"a": 2}


def test_a_single_object_is_no_dataset(path):
    with pytest.raises(DataError, match=r"rows.json: line 1 begins a single JSON object; expected"):
        list(read_json(write(path, '{\n "data": []\n}')))


@pytest.mark.parametrize("text", ["", " \n\t\n", "\ufeff"])
def test_an_empty_file_has_no_rows(path, text):
    assert list(read_json(write(path, text))) == []
    assert list(read_jsonl(path)) == []


def test_a_torn_last_line_costs_only_itself(path):
    rows = list(read_jsonl(write(path, '{"a": 1}\n{"a": 2}\n{"a": "th')))
    assert rows[:2] == [{"a": 1}, {"a": 2}]
    assert rows[2].startswith("line 3 is not valid JSON (Unterminated string")


def test_lines_that_are_no_objects_are_broken_rows_and_blank_lines_none(path):
    rows = list(read_jsonl(write(path, '\ufeff{"a": 1}\r\n\r\n7\n' + "[" * 100_000 + "\n")))
    assert rows[0] == {"a": 1}
    assert rows[1] == "line 3: expected an object, got int 7"
    assert rows[2].startswith("line 4 is not valid JSON")


@given(rows=ROWS, end=st.sampled_from(["\n", "\r\n", "\n\n"]))
def test_lines_are_read_as_json_reads_them(path, rows, end):
    text = "".join(json.dumps(row) + end for row in rows)
    assert list(read_jsonl(write(path, text))) == rows


@pytest.mark.parametrize("read", [read_json, read_jsonl])
def test_text_in_another_encoding_is_refused(path, read):
    text = '[{"a": "x"},\n{"a": "é"}]' if read is read_json else '{"a": "x"}\n{"a": "é"}'
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match="line 2: byte 0xe9 is not UTF-8 text; convert it"):
        list(read(path))


@pytest.mark.parametrize("kind", ["UTF-16LE", "UTF-16BE", "UTF-32LE", "UTF-32BE"])
@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".txt"])
def test_other_encodings_without_a_mark_are_refused(tmp_path, kind, suffix):
    path = tmp_path / f"rows{suffix}"  # valid UTF-8 with a NUL beside every letter
    text = '{"a": 1}' if suffix == ".jsonl" else '[{"a": 1}]' if suffix == ".json" else "a,b\n1,2"
    path.write_bytes(text.encode(kind))
    with pytest.raises(DataError, match=f"line 1: NUL .* iconv -f {kind} -t UTF-8"):
        list(READERS[suffix](path))


HUGE = "9" * 5000  # digits, more than Python reads


def test_an_integer_of_thousands_of_digits_in_a_list_is_an_error(path):
    with pytest.raises(DataError, match=r"rows\.json: row 2: Exceeds the limit"):
        list(read_json(write(path, f'[{{"a": 1}}, {{"a": [{HUGE}]}}]')))


EITHER = pytest.mark.parametrize("read", [read_json, read_jsonl])


@EITHER
def test_a_line_with_a_huge_integer_is_a_broken_row(path, read):
    first, second = read(write(path, f'{{"a": {HUGE}}}\n{{"a": 2}}\n'))
    assert first.startswith("line 1 is not valid JSON (Exceeds the limit")
    assert second == {"a": 2}


def test_a_list_in_a_file_of_lines_says_how_to_rename_it(path):
    with pytest.raises(DataError, match=r"expected one object per line, got a list; .* \.json"):
        list(read_jsonl(write(path, '[\n{"a": 1},\n{"a": 2}\n]\n')))


@EITHER
def test_python_dicts_say_how_to_write_rows(path, read):
    assert all("json.dumps" in row for row in read(write(path, "{'a': 1}\n{'a': 2}\n")))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-be-bom"])
@EITHER
def test_text_in_another_encoding_names_it(path, read, encoding):
    text = '[{"a": "é"}]' if read is read_json else '{"a": "é"}\n'
    is_big = encoding == "utf-16-be-bom"
    path.write_bytes(b"\xfe\xff" + text.encode("utf-16-be") if is_big else text.encode(encoding))
    with pytest.raises(DataError, match=f"iconv -f {encoding[:6].upper()} -t UTF-8"):
        list(read(path))
