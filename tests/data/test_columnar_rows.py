"""Rows of columnar files mean what they meant before: nulls of structures, columns of JSON."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surefoot.data.example import BrokenRow
from surefoot.data.rows.registry import read_entry
from surefoot.data.rows.rows import read_examples


def function(name, required=(), /, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def row(tool, /, *, tools=True, **arguments):
    name = tool["function"]["name"]
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    said = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    return {"messages": said, **({"tools": [tool]} if tools else {})}


CITY = {"type": "string", "description": "A city"}
UNIT = {"type": "string", "enum": ["C", "F"], "default": "C"}
WEATHER = function("weather", ["city"], city=CITY, unit=UNIT)
ADD = function("add", ["x"], x={"type": "number"}, y={"type": "number"})
ROWS = [row(WEATHER, city="Rome"), row(ADD, x=2, y=3), row(WEATHER, city="Oslo", unit="F")]


def examples(source, **entry):
    """What is trained of each row, and what is said of it."""
    path, folder = str(source), source.parent
    found = list(read_examples(read_entry("d", {"file_name": path, **entry}, folder, "d")))
    return [(e.messages, e.tools, e.notes) for e in found]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def arrow(path, rows):
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table)
    return path


def saved(path, rows):
    datasets.Dataset(pa.Table.from_pylist(rows)).save_to_disk(path)
    return path


def exported(path, rows):
    return jsonl(path, pa.Table.from_pylist(rows).to_pylist())


FORMS = [(parquet, "a.parquet"), (arrow, "a.arrow"), (saved, "a"), (exported, "b.jsonl")]


@pytest.mark.parametrize(("write", "name"), FORMS)
def test_nulls_that_a_columnar_file_adds_reach_neither_schemas_nor_calls(tmp_path, write, name):
    found = examples(write(tmp_path / name, ROWS))
    wanted = examples(jsonl(tmp_path / "rows.jsonl", ROWS))
    assert [each[:2] for each in found] == [each[:2] for each in wanted]
    assert "null" not in json.dumps([each[1] for each in found])
    assert [bool(each[2]) for each in found] == [True, False, False], "unit may have been meant"


@pytest.mark.parametrize("text", ["tools", "calls"])
def test_text_beside_structures_is_what_it_says(tmp_path, text):
    rows = [json.loads(json.dumps(each)) for each in ROWS]
    for each in rows:
        call = each["messages"][1]["tool_calls"][0]["function"]
        if text == "calls":
            call["arguments"] = json.dumps(call["arguments"] | {"unit": None})
        else:
            each["tools"] = json.dumps(each["tools"])
    wanted = examples(jsonl(tmp_path / "rows.jsonl", rows))
    for write, name in FORMS:
        found = examples(write(tmp_path / name, rows))
        assert [each[:2] for each in found] == [each[:2] for each in wanted]


def test_a_null_that_somebody_wrote_stays(tmp_path):
    optional = {"type": ["string", "null"], "default": None}
    tool = function("find", ["zone"], name=CITY, unit=optional, zone=optional)
    rows = [row(tool, name="Rome", unit=None, zone=None)] * 2
    ((messages, tools, notes), _) = examples(jsonl(tmp_path / "rows.jsonl", rows))
    assert messages[1].tool_calls[0]["arguments"] == {"name": "Rome", "unit": None, "zone": None}
    assert tools == (tool["function"],)
    assert not notes
    found = examples(parquet(tmp_path / "rows.parquet", rows))[0]
    assert found[0][1].tool_calls[0]["arguments"] == {"name": "Rome", "zone": None}, "required"
    assert "omitted" in found[2][0]


def test_a_null_of_a_call_without_a_schema_is_named(tmp_path):
    rows = [row(WEATHER, tools=False, city="Rome"), row(ADD, tools=False, x=2)]
    ((messages, _, notes), _) = examples(exported(tmp_path / "rows.jsonl", rows))
    assert messages[1].tool_calls[0]["arguments"] == {"city": "Rome", "x": None}
    assert "kept" in notes[0]
    ((messages, _, notes), _) = examples(parquet(tmp_path / "rows.parquet", rows))
    assert messages[1].tool_calls[0]["arguments"] == {"city": "Rome"}
    assert "omitted" in notes[0]


MIXED = [row(WEATHER, city="Rome", unit=None), row(ADD, x=2, y=[3]), row(WEATHER, city=7)]


@pytest.mark.parametrize("write", ["to_parquet", "save_to_disk", "hub"])
def test_columns_of_the_type_json_are_read(tmp_path, write, monkeypatch):
    """As ``datasets`` stores values whose types differ, since its version 4.8."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    source = jsonl(tmp_path / "rows.jsonl", MIXED)
    made = datasets.Dataset.from_list(MIXED, on_mixed_types="use_json")
    assert "Json" in str(made.features)
    wanted = examples(source)
    if write == "hub":
        (tmp_path / "hub").mkdir()
        made.to_parquet(tmp_path / "hub" / "train.parquet")
        entry = read_entry("d", {"hf_hub_url": str(tmp_path / "hub")}, tmp_path, "d")
        found = [(e.messages, e.tools, e.notes) for e in read_examples(entry)]
    else:
        getattr(made, write)(tmp_path / "rows.parquet")
        found = examples(tmp_path / "rows.parquet")
    assert [each[:2] for each in found] == [each[:2] for each in wanted]
    assert found[0][0][1].tool_calls[0]["arguments"] == {"city": "Rome", "unit": None}


def test_turns_and_tools_may_be_texts_of_json_one_by_one(tmp_path):
    """As a library leaves them that does not know the type Json."""
    texts = [{name: [json.dumps(each) for each in row[name]] for name in row} for row in ROWS]
    wanted = examples(jsonl(tmp_path / "rows.jsonl", ROWS))
    assert examples(parquet(tmp_path / "rows.parquet", texts)) == wanted


def test_a_map_is_an_object(tmp_path):
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": []}]}
    call["tool_calls"][0]["arguments"] = [("city", "Rome")]
    turn = pa.struct(
        {
            "role": pa.string(),
            "content": pa.string(),
            "tool_calls": pa.list_(
                pa.struct({"name": pa.string(), "arguments": pa.map_(pa.string(), pa.string())})
            ),
        }
    )
    said = [[{"role": "user", "content": "a", "tool_calls": None}, call]]
    table = pa.table({"messages": pa.array(said, pa.list_(turn))})
    pq.write_table(table, tmp_path / "rows.parquet")
    ((messages, _, _),) = examples(tmp_path / "rows.parquet")
    assert messages[1].tool_calls[0]["arguments"] == {"city": "Rome"}


TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("good", "column", "entry"),
    [
        ({"question": "q", "answer": "a"}, "question", {}),
        ({"messages": TURNS}, "messages", {}),
        ({"conversations": TURNS}, "conversations", {}),
        ({"prompt": "q", "completion": "a", "label": True}, "label", {}),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "chosen", {}),
        ({"instruction": "q", "chosen": "a", "rejected": "b"}, "rejected", {"ranking": True}),
        ({"text": "q"}, "text", {}),
    ],
)
@pytest.mark.parametrize("place", [0, 30])
def test_rows_with_a_null_are_dropped_and_the_others_read(tmp_path, good, column, entry, place):
    """However many there are, and where; 10 broken rows would stop a run."""
    rows = [dict(good) for _ in range(40)]
    for bad in rows[place : place + 25]:
        bad[column] = None
    source = jsonl(tmp_path / "rows.jsonl", rows)
    made = read_entry("d", {"file_name": str(source), **entry}, tmp_path, "d")
    read = list(read_examples(made))
    whole = read_entry("d", {"file_name": str(jsonl(tmp_path / "w.jsonl", [good])), **entry},
                       tmp_path, "d")  # fmt: skip
    assert made.format == whole.format
    left_out = [row for row in read if isinstance(row, BrokenRow)]
    assert len(left_out) == len(rows[place : place + 25])
    assert {(row.is_dropped, row.reason) for row in left_out} == {
        (True, f"no value in the column {column!r}")
    }


@pytest.mark.parametrize("nulls", [1, 25, 60])
def test_a_question_whose_answer_is_null_is_no_plain_text(tmp_path, nulls):
    rows = [{"question": "q", "answer": None if n < nulls else "a"} for n in range(60)]
    entry = read_entry("d", {"file_name": str(jsonl(tmp_path / "a.jsonl", rows))}, tmp_path, "d")
    read = list(read_examples(entry))
    assert [len(example.messages) for example in read] == [1] * nulls + [2] * (60 - nulls)
    assert not any(example.text for example in read)
