"""From entries to examples: every row is used or accounted for."""

import json

import numpy as np
import pytest

from surefoot.data.example import BrokenRow, Example
from surefoot.data.rows.catalog import Catalog
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


def test_a_column_may_be_in_a_row_that_is_not_chosen(entry):
    rows = [GOOD, GOOD, {**GOOD, "persona": "Be kind."}]
    made = entry(*rows, columns={"system": "persona"})
    for last in (0, 1):
        assert len(list(read_examples(made, chosen=np.arange(last + 1)))) == last + 1
    assert entry(*rows, num_samples=3).limit(None) == 3
    assert entry(*rows, num_samples=3).limit(2) == 2
    assert entry(*rows).limit(None) is None


def test_only_broken_rows_within_the_limit_are_no_examples(entry):
    assert [row.index for row in read_examples(entry("{", "["), max_broken_rows=2)] == [0, 1]


# Columns and keys that change what a row means are read, or they stop the run.


@pytest.fixture
def read(entry):
    """A function that reads rows by an entry."""
    return lambda *rows, **raw: list(read_examples(entry(*rows, **raw)))


def turns(**more):
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", **more}]}


@pytest.mark.parametrize("name", ["videos", "audios", "video", "audio"])
def test_a_row_with_a_video_is_not_its_text_alone(read, name):
    rows = [{**GOOD, name: None}, {**GOOD, name: []}, {**GOOD, name: ["1.png"]}]
    assert len(read(*rows[:2])) == 2
    with pytest.raises(DataError, match=rf"'d': row 2 has {name}, and only text and pictures"):
        read(*rows)
    assert len(read(*rows, columns={name: None})) == 3, "the cure that it names"


def test_functions_in_the_older_column_are_not_left_out(read):
    row = {**GOOD, "functions": [{"name": "f"}]}
    with pytest.raises(DataError, match="row 0 has the column 'functions', which is not read"):
        read(row)
    assert read(row, columns={"tools": "functions"})[0].tools == ({"name": "f"},)
    assert read(row, columns={"tools": None})[0].tools == ()


def test_a_function_call_in_the_older_key_is_read(read):
    call = {"name": "f", "arguments": '{"x": 1}'}
    (example,) = read(turns(content=None, function_call=call), formatting="openai")
    assert example.messages[1].tool_calls == ({"name": "f", "arguments": {"x": 1}},)


@pytest.mark.parametrize(
    ("flag", "learn"),
    [
        *[({name: 0}, False) for name in ("weight", "loss_mask", "loss_scale", "lossWeight")],
        *[({name: False}, False) for name in ("loss", "train", "trainable", "step_loss_mask")],
        *[({name: True}, False) for name in ("masked", "mask", "is_masked")],
        ({"loss_scale": 0.0}, False),
        ({"training": "no"}, False),
        ({"isTrainable": "false"}, False),
        ({"loss_mask": 1}, True),
        ({"masked": 0}, True),
        ({"loss": None, "trainable": ""}, None),
        ({"constrained": 3, "glossary": "a", "learner": "b"}, None),
        ({"weight": 0, "trainable": False}, False),
    ],
)
@pytest.mark.parametrize("form", ["openai", "sharegpt", "trl"])
def test_flags_of_a_turn_say_what_is_learnt(read, flag, learn, form):
    if form == "trl":
        row = {"prompt": "a", "completion": [{"role": "assistant", "content": "b", **flag}]}
    elif form == "openai":
        row = turns(content="b", **flag)
    else:
        row = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
        row["conversations"][1] |= flag
    (example,) = read(row, formatting=form)
    assert example.messages[1].learn is learn


@pytest.mark.parametrize(
    "flag",
    [
        *[{"loss_scale": 0.5}, {"mask": 1}, {"loss_mask": [0, 1]}, {"trainable": "last"}],
        *[{"no_loss": True}, {"token_weights": [1.0]}, {"doNotTrain": 1}, {"unmask": True}],
        {"weight": 1, "masked": True},
    ],
)
def test_a_flag_of_a_turn_without_an_obvious_meaning_is_refused_by_its_name(read, flag):
    with pytest.raises(DataError) as caught:
        read(turns(content="b", **flag), formatting="openai")
    assert f"turn 2: {next(iter(flag))!r}" in str(caught.value)
    assert '"weight": 0' in str(caught.value)


@pytest.mark.parametrize("role", ["function_call", "gpt"])
def test_a_call_as_a_turn_of_its_own_has_flags_too(read, role):
    said = [{"from": "human", "value": "a"}, {"from": role, "value": '{"name": "f"}', "loss": 0}]
    assert read({"conversations": said}, formatting="sharegpt")[0].messages[1].learn is False


def test_a_part_of_a_turn_is_not_learnt_apart(read):
    parts = [{"type": "text", "text": "b", "loss": False}]
    with pytest.raises(DataError, match="a turn is trained on as a whole"):
        read(turns(content=parts), formatting="openai")


@pytest.mark.parametrize(
    ("flag", "learnt"),
    [
        ({"loss_mask": [0, 1]}, (False, True)),
        ({"loss_mask": "[0, 1]"}, (False, True)),
        ({"trainable": [True, False]}, (True, False)),
        ({"masked": [1, 0]}, (False, True)),
        ({"trainable": True}, (None, None)),
        ({"loss_mask": None, "masked": []}, (None, None)),
    ],
)
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_a_column_with_a_flag_for_each_turn_says_what_is_learnt(read, flag, learnt, system):
    (example,) = read({**turns(content="b"), **flag, "system": system}, formatting="openai")
    assert tuple(message.learn for message in example.messages[bool(system) :]) == learnt
    assert example.unread == ()


@pytest.mark.parametrize("flag", [{"trainable": False}, {"loss_mask": 0}, {"train": "no"}])
def test_a_row_that_is_not_to_be_learnt_is_dropped(read, flag):
    rows = read(*[{**turns(content="b"), **flag}] * 12, formatting="openai")
    assert {row.is_dropped for row in rows} == {True}
    assert rows[0].reason == f"the column {next(iter(flag))!r} says that it is not to be trained on"


@pytest.mark.parametrize("flag", [{"loss_mask": [0, 1, 1]}, {"mask": [1, 0]}, {"loss_scale": 0.5}])
def test_a_flag_of_a_row_without_an_obvious_meaning_is_refused_by_its_name(read, flag):
    with pytest.raises(DataError, match=f"column {next(iter(flag))!r}: expected"):
        read({**turns(content="b"), **flag}, formatting="openai")


@pytest.mark.parametrize(
    "flag", [{"loss": 1.23}, {"weight": 0}, {"mask": "User"}, {"attention_mask": [1, 1, 1]}]
)
def test_another_column_that_speaks_of_learning_is_named(read, flag):
    (example,) = read({**turns(content="b"), **flag}, formatting="openai")
    assert example.unread == tuple(flag)


@pytest.mark.parametrize(("more", "hint"), [({"images": ["1.png"]}, "a column 'images'")])
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
    row = {**GOOD, name: value}
    assert read(row)[0].unread_mark == name
    assert read(row, columns={"kto_tag": None})[0].unread_mark is None
    read_by_it = read(row, columns={"kto_tag": name})[0]
    assert (read_by_it.unread_mark, read_by_it.label) == (None, value is True)


@pytest.mark.parametrize("value", [None, 1, 0.5, "positive", "1"])
def test_a_label_that_is_no_mark_may_be_anything(read, value):
    assert read({**GOOD, "label": value})[0].unread_mark is None


@pytest.mark.parametrize("name", ["score", "label", "Weight", "val_loss", "id", "role", "user"])
def test_a_column_that_nothing_reads_is_named(read, name):
    rows = [{**GOOD, name: None}, {**GOOD, name: 0.5}]
    assert [row.unread for row in read(*rows)] == [(), (name,)]


@pytest.mark.parametrize(
    ("row", "raw", "unread"),
    [
        ({**GOOD, "input": "c", "system": "d", "history": [["e", "f"]]}, {}, ()),
        ({**GOOD, "chosen": "c"}, {"formatting": "alpaca"}, ("chosen",)),
        ({**GOOD, "chosen": "c", "rejected": "d"}, {"ranking": True}, ("output",)),
        ({"q": "a", "a": "b", "input": "c"}, {"columns": {"prompt": "q", "response": "a"}}, ()),
        (
            {"q": "a", "a": "b", "input": "c"},
            {"columns": {"prompt": "q", "response": "a", "query": None}},
            ("input",),
        ),
        ({**turns(content="b"), "prompt": "a", "scores": [1]}, {}, ("prompt", "scores")),
        ({**GOOD, "images": ["1.png"]}, {"columns": {"images": None}}, ()),
    ],
)
def test_what_an_entry_reads_or_mentions_is_not_named(read, row, raw, unread):
    assert read(row, **raw)[0].unread == unread
