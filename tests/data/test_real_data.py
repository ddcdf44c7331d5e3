"""The real datasets beside the checkout, against a plain reading of their JSON."""

import json

import pytest

from surefoot.data.rows.catalog import Catalog
from surefoot.data.rows.rows import read_examples
from surefoot.data.section import DataSection

COUNTS = {
    "alpaca_en_demo": 999,
    "glaive_toolcall_en_demo": 300,
    "dpo_en_demo": 300,
    "kto_en_demo": 300,
    "c4_demo": 300,
}
ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}


@pytest.fixture
def read(shared):
    """A function that gives a dataset's rows and its examples, none broken."""

    def load(name):
        path = next((shared / "data").glob(f"{name}.json*"))
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        rows = [json.loads(line) for line in lines]
        entry = Catalog(DataSection(datasets=(name,), dataset_dir=shared / "data")).entry(name)
        return rows[0] if path.suffix == ".json" else rows, list(read_examples(entry))

    return load


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_every_row_is_read(read, name, count):
    rows, examples = read(name)
    assert len(rows) == len(examples) == count
    assert [e.origin for e in examples] == [f"{name}:{n}" for n in range(count)]


def test_alpaca(read):
    for row, example in zip(*read("alpaca_en_demo"), strict=True):
        question = row["instruction"] + ("\n" + row["input"] if row["input"] else "")
        assert [m.content for m in example.messages] == [question, row["output"]]
        assert example.text is None


def test_tool_calls(read):
    calls = 0
    for row, example in zip(*read("glaive_toolcall_en_demo"), strict=True):
        assert list(example.tools) == json.loads(row["tools"])
        for turn, message in zip(row["conversations"], example.messages, strict=True):
            assert message.role == ROLES[turn["from"]]
            if turn["from"] == "function_call":
                calls += 1
                assert message.tool_calls == (json.loads(turn["value"]),)
                assert message.content == ""
            else:
                assert message.content == turn["value"]
    assert calls == 211


def test_preferences(read):
    for row, example in zip(*read("dpo_en_demo"), strict=True):
        assert [m.content for m in example.messages] == [t["value"] for t in row["conversations"]]
        assert example.chosen.content == row["chosen"]["value"]
        assert example.rejected.content == row["rejected"]["value"]
        assert example.messages[-1].role == "user"


def test_desirable_answers(read):
    rows, examples = read("kto_en_demo")
    assert [e.label for e in examples] == [row["label"] for row in rows]
    assert sum(e.label for e in examples) == 150
    for row, example in zip(rows, examples, strict=True):
        assert [m.role for m in example.messages] == [m["role"] for m in row["messages"]]


def test_texts(read):
    rows, examples = read("c4_demo")
    assert [e.text for e in examples] == [row["text"] for row in rows]
