"""Columns and keys that change what a row means are read, or they stop the run."""

import json

import pytest

from surefoot.data.rows.registry import read_registry
from surefoot.data.rows.rows import read_examples
from surefoot.errors import DataError

QUESTION = {"instruction": "a", "output": "b"}


@pytest.fixture
def read(tmp_path):
    """A function that reads rows by an entry."""

    def examples(*rows, **raw):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "rows.jsonl").write_text(lines)
        info = {"d": {"file_name": "rows.jsonl", **raw}}
        (tmp_path / "dataset_info.json").write_text(json.dumps(info))
        return list(read_examples(read_registry(tmp_path).entry("d")))

    return examples


def turns(**more):
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", **more}]}


@pytest.mark.parametrize("name", ["images", "videos", "audios", "image", "video", "audio"])
def test_a_row_with_an_image_is_not_its_text_alone(read, name):
    rows = [{**QUESTION, name: None}, {**QUESTION, name: []}, {**QUESTION, name: ["1.png"]}]
    assert len(read(*rows[:2])) == 2
    with pytest.raises(DataError, match=rf"'d': row 2 has {name}, and only text is supported"):
        read(*rows)
    assert len(read(*rows, columns={name: None})) == 3, "the cure that it names"


def test_functions_in_the_older_column_are_not_left_out(read):
    row = {**QUESTION, "functions": [{"name": "f"}]}
    with pytest.raises(DataError, match="row 0 has the column 'functions', which is not read"):
        read(row)
    assert read(row, columns={"tools": "functions"})[0].tools == ({"name": "f"},)
    assert read(row, columns={"tools": None})[0].tools == ()


def test_a_function_call_in_the_older_key_is_read(read):
    call = {"name": "f", "arguments": '{"x": 1}'}
    (example,) = read(turns(content=None, function_call=call), formatting="openai")
    assert example.messages[1].tool_calls == ({"name": "f", "arguments": {"x": 1}},)


@pytest.mark.parametrize(
    ("more", "hint"),
    [
        ({"loss": False}, '"weight": 0'),
        ({"train": False}, '"weight": 0'),
        ({"images": ["1.png"]}, "only text"),
    ],
)
def test_keys_of_a_turn_that_change_its_meaning_are_not_left_out(read, more, hint):
    with pytest.raises(DataError, match="is not read; ") as caught:
        read(*[turns(content="b", **more)] * 11, formatting="openai")
    assert f"turn 2: {next(iter(more))!r}" in str(caught.value)
    assert hint in str(caught.value)
    assert len(read(turns(content="b", **dict.fromkeys(more)), formatting="openai")) == 1


def test_text_parts_may_have_their_text_under_value(read):
    (example,) = read(turns(content=[{"type": "text", "value": "b"}]), formatting="openai")
    assert example.messages[1].content == "b"


@pytest.mark.parametrize("name", ["kto_tag", "label"])
@pytest.mark.parametrize("value", [True, False, "False"])
def test_a_column_that_seems_to_mark_responses_is_remembered_unless_the_entry_says(
    read, name, value
):
    row = {**QUESTION, name: value}
    assert read(row)[0].unread_mark == name
    assert read(row, columns={"kto_tag": None})[0].unread_mark is None
    read_by_it = read(row, columns={"kto_tag": name})[0]
    assert (read_by_it.unread_mark, read_by_it.label) == (None, value is True)


@pytest.mark.parametrize("value", [None, 1, 0.5, "positive", "1"])
def test_a_label_that_is_no_mark_may_be_anything(read, value):
    assert read({**QUESTION, "label": value})[0].unread_mark is None


@pytest.mark.parametrize("name", ["score", "label", "system_prompt", "reward", "Weight", "context"])
def test_a_column_that_nothing_reads_is_named_if_it_sounds_as_if_it_meant_something(read, name):
    rows = [{**QUESTION, name: None}, {**QUESTION, name: 0.5, "id": 3, "source": "web"}]
    assert [row.unread for row in read(*rows)] == [(), (name,)]


@pytest.mark.parametrize(
    ("row", "raw", "unread"),
    [
        ({**QUESTION, "input": "c", "system": "d", "history": [["e", "f"]]}, {}, ()),
        ({**QUESTION, "chosen": "c"}, {"formatting": "alpaca"}, ("chosen",)),
        ({**QUESTION, "chosen": "c", "rejected": "d"}, {"ranking": True}, ("output",)),
        ({"q": "a", "a": "b", "input": "c"}, {"columns": {"prompt": "q", "response": "a"}}, ()),
        (
            {"q": "a", "a": "b", "input": "c"},
            {"columns": {"prompt": "q", "response": "a", "query": None}},
            ("input",),
        ),
        ({**turns(content="b"), "prompt": "a", "scores": [1]}, {}, ("prompt", "scores")),
        ({**QUESTION, "images": ["1.png"]}, {"columns": {"images": None}}, ()),
        ({**QUESTION, "reworded": 1, "labelled": 2, "scorer": 3}, {}, ()),
    ],
)
def test_what_an_entry_reads_or_mentions_is_not_named(read, row, raw, unread):
    assert read(row, **raw)[0].unread == unread
