"""From entries to examples: every row is used or accounted for."""

import json

import numpy as np
import pytest

from surefoot.data.example import Example
from surefoot.data.rows.catalog import Catalog
from surefoot.data.rows.row_sources import BrokenRow
from surefoot.data.rows.rows import read_examples
from surefoot.data.section import DataSection
from surefoot.errors import DataError

GOOD = {"instruction": "a", "output": "b"}


@pytest.fixture
def entry(tmp_path):
    """A function that makes an entry of rows; a string among them is a line as it stands."""

    def make(*rows, **raw):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "rows.jsonl").write_text("".join(line + "\n" for line in lines))
        info = {"d": {"file_name": "rows.jsonl", **raw}}
        (tmp_path / "dataset_info.json").write_text(json.dumps(info))
        return Catalog(DataSection(datasets=("d",), dataset_dir=tmp_path)).entry("d")

    return make


def test_examples_know_where_they_come_from(entry):
    assert [e.origin for e in read_examples(entry(GOOD, GOOD))] == ["d:0", "d:1"]


def test_arguments_of_a_row_are_those_with_a_value(entry):
    given = {"enable_thinking": False, "effort": None}
    rows = [{**GOOD, "chat_template_kwargs": each} for each in (given, json.dumps(given), None)]
    wanted = [{"enable_thinking": False}] * 2 + [{}]
    assert [e.template_arguments for e in read_examples(entry(*rows))] == wanted
    with pytest.raises(DataError, match="'chat_template_kwargs': expected an object, got list"):
        list(read_examples(entry({**GOOD, "chat_template_kwargs": [1]})))


def test_broken_rows_keep_their_place_and_say_why(entry):
    rows = list(read_examples(entry(GOOD, "{", {**GOOD, "output": 1}, GOOD), max_broken_rows=2))
    assert [type(row) for row in rows] == [Example, BrokenRow, BrokenRow, Example]
    assert [row.index for row in rows[1:3]] == [1, 2]
    assert "line 2 is not valid JSON" in rows[1].reason
    assert rows[2].reason == "column 'output': expected text, got int 1; write it as text: \"1\""
    assert rows[3].origin == "d:3"


def test_too_many_broken_rows_stop_and_the_first_ones_are_shown(entry):
    bad = [{**GOOD, "output": n} for n in range(6)]
    reader = read_examples(entry(GOOD, *bad), max_broken_rows=4)
    assert sum(1 for _ in zip(range(5), reader, strict=False)) == 5
    with pytest.raises(DataError) as caught:
        next(reader)
    text = str(caught.value)
    assert "dataset 'd': more than data.max_broken_rows = 4 rows cannot be read" in text
    assert "row 1: column 'output': expected text, got int 0" in text
    assert text.count("\n") == 3


@pytest.mark.parametrize("rows", [[], ["", " "]])
def test_a_dataset_without_rows_is_an_error(entry, rows):
    with pytest.raises(DataError, match=r"dataset 'd': .*rows.jsonl has no rows"):
        list(read_examples(entry(*rows)))


def test_a_listed_column_that_no_row_has_is_named_with_those_there_are(entry):
    found = entry(GOOD, {**GOOD, "id": 1}, columns={"response": "ouput"})
    with pytest.raises(DataError) as caught:
        list(read_examples(found))
    assert "no row has the column 'ouput' (did you mean output?)" in str(caught.value)
    assert str(caught.value).endswith("are: instruction, output, id")


def test_an_absent_question_is_told_once_and_not_as_broken_rows(entry):
    with pytest.raises(
        DataError,
        match=r"no column has a usual name, .*did you mean text by txt.*; the columns of .* txt$",
    ):
        list(read_examples(entry({"txt": "a"}, {"txt": "b"})))


@pytest.mark.parametrize(
    ("row", "raw", "advice"),
    [
        ({"messages": []}, {"formatting": "alpaca"}, 'add "formatting": "openai" to the entry'),
        (
            {"conversations": []},
            {"formatting": "alpaca"},
            'add "formatting": "sharegpt" to the entry',
        ),
        (GOOD, {"formatting": "openai"}, 'add "formatting": "alpaca" to the entry'),
        ({"text": "a"}, {"formatting": "alpaca"}, 'add "columns": {"prompt": "text"} to the entry'),
    ],
)
def test_columns_of_another_format_tell_what_to_add_to_the_entry(entry, row, raw, advice):
    with pytest.raises(DataError) as caught:
        list(read_examples(entry(row, **raw)))
    assert f"({advice}?); the columns of" in str(caught.value)


def test_a_listed_column_may_be_in_few_rows(entry):
    found = entry(GOOD, GOOD, {**GOOD, "sys": "x"}, columns={"system": "sys"})
    assert len(list(read_examples(found))) == 3
    assert len(list(read_examples(found, max_samples=1))) == 1


def test_the_first_rows_are_used_where_not_all_are(entry):
    rows = [{**GOOD, "output": str(n)} for n in range(5)]

    def outputs(found, **limits):
        return [e.messages[-1].content for e in read_examples(found, **limits)]

    assert outputs(entry(*rows), max_samples=2) == ["0", "1"]
    assert outputs(entry(*rows), chosen=np.array([1, 4])) == ["1", "4"]
    assert entry(*rows, num_samples=3).limit(None) == 3
    assert entry(*rows, num_samples=3).limit(2) == 2
    assert entry(*rows).limit(None) is None


def test_only_broken_rows_within_the_limit_are_no_examples(entry):
    assert [row.index for row in read_examples(entry("{", "["), max_broken_rows=2)] == [0, 1]
