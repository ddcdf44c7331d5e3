"""Files of prompts: what is one, what comes along, and what is refused with its line."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surefoot.data.example import Message
from surefoot.data.rows.catalog import training_examples
from surefoot.data.section import DataSection
from surefoot.data.text.prompts import read_prompts
from surefoot.errors import DataError
from surefoot.schema.locations import DatasetReference


def write(path, *rows):
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


def test_a_text_file_has_a_prompt_a_line_and_blank_lines_are_none(tmp_path):
    path = tmp_path / "q.txt"
    path.write_bytes('\ufeffHi\r\n\n  two  words \n{"prompt": 1}'.encode())
    found = read_prompts(path)
    assert [p.row["prompt"] for p in found] == ["Hi", "  two  words ", '{"prompt": 1}']
    assert [p.origin.rpartition(": ")[2] for p in found] == ["line 1", "line 3", "line 4"]
    assert found[0].messages == (Message("user", "Hi"),)


def test_a_row_has_a_prompt_or_a_conversation_and_keeps_the_rest(tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [
        {"id": 3, "prompt": "Hi"},
        {"messages": [{"role": "system", "content": "s"}, *turns, turns[0]], "tag": ["x"]},
    ]
    one, two = read_prompts(write(tmp_path / "q.jsonl", *rows))
    assert (one.row, two.row) == tuple(rows)
    assert [m.role for m in two.messages] == ["system", "user", "assistant", "user"]


USER = {"role": "user", "content": "a"}
ASKED = (Message("system", "s"), Message("user", "a"), Message("assistant", "b"))
ASKED, ANSWER = (*ASKED, Message("user", "c")), Message("assistant", "d")
SAME = {  # rows of a dataset, as every format has them
    "openai": {"messages": [{"role": m.role, "content": m.content} for m in ASKED]},
    "openai, answered": {
        "messages": [{"role": m.role, "content": m.content} for m in (*ASKED, ANSWER)]
    },
    "sharegpt": {
        "system": "s",
        "conversations": [
            {"from": ["human", "gpt"][at % 2], "value": text} for at, text in enumerate("abcd")
        ],
    },
    "alpaca": {"system": "s", "history": [["a", "b"]], "instruction": "c", "output": "d"},
    "pairs": {"system": "s", "history": [["a", "b"]], "instruction": "c", "chosen": "d"},
    "prompt and completion": {
        "system": "s",
        "prompt": [{"role": m.role, "content": m.content} for m in ASKED[1:]],
        "completion": "d",
    },
}


@pytest.mark.parametrize("kind", SAME)
def test_every_row_of_a_dataset_is_a_prompt_without_its_response(kind, tmp_path):
    (found,) = read_prompts(write(tmp_path / "q.jsonl", SAME[kind]))
    assert found.messages == ASKED
    assert found.row == SAME[kind]


def test_rows_come_from_all_kinds_of_files_that_datasets_have(tmp_path):
    rows = [{"instruction": "a", "input": "b", "output": "c"}, {"instruction": "d", "input": ""}]
    (tmp_path / "q.json").write_text(json.dumps(rows))
    (tmp_path / "q.csv").write_text("instruction,input,output\na,b,c\nd,,\n")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "q.parquet")
    for kind in ("json", "csv", "parquet"):
        found = read_prompts(tmp_path / f"q.{kind}")
        assert [p.messages[0].content for p in found] == ["a\nb", "d"]
    (tmp_path / "q.csv").write_text("frage\na\n")
    with pytest.raises(DataError, match=r"q\.csv: row 0: expected one of the keys"):
        read_prompts(tmp_path / "q.csv")
    (tmp_path / "q.json").write_text("{")
    with pytest.raises(DataError, match=r"q\.json"):
        read_prompts(tmp_path / "q.json")


def test_a_question_is_a_prompt_and_its_answer_what_is_expected(tmp_path):
    (tmp_path / "q.csv").write_text("context,question,answer\nA map.,Where?,Here.\n,Who?,\n")
    one, two = read_prompts(tmp_path / "q.csv")
    assert one.messages == (Message("user", "Where?\nA map."),)
    assert one.row == {"context": "A map.", "question": "Where?", "expected": "Here."}
    assert two.messages == (Message("user", "Who?"),)
    (found,) = read_prompts(write(tmp_path / "q.jsonl", {"prompt": "Hi", "answer": "Ho"}))
    assert found.row == {"prompt": "Hi", "expected": "Ho"}


def test_a_prompt_may_be_messages(tmp_path):
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    answered = {"prompt": turns, "completion": [{"role": "assistant", "content": "b"}]}
    for found in read_prompts(write(tmp_path / "q.jsonl", {"prompt": turns}, answered)):
        assert found.messages == (Message("system", "s"), Message("user", "a"))


MAPPED = {  # entries of a recipe, a row of each, and the same row under usual names
    "columns": (
        {"columns": {"prompt": "frage", "response": "antwort", "system": "rolle"}},
        {"frage": "a", "antwort": "b", "rolle": "s", "prompt": "no"},
        {"instruction": "a", "output": "b", "system": "s"},
    ),
    "switched off": (
        {"columns": {"query": None, "system": None}},
        {"instruction": "a", "input": "hidden", "system": "hidden"},
        {"instruction": "a"},
    ),
    "tags": (
        {
            "formatting": "sharegpt",
            "columns": {"messages": "talk", "tools": "functions"},
            "tags": {"role_tag": "who", "content_tag": "says", "user_tag": "me"},
        },
        {"talk": [{"who": "me", "says": "a"}], "functions": [{"name": "add", "parameters": {}}]},
        {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"name": "add", "parameters": {}}],
        },
    ),
    "pairs without their answers": (
        {"ranking": True, "columns": {"prompt": "q", "chosen": "good", "rejected": "bad"}},
        {"q": "a"},
        {"instruction": "a"},
    ),
    "labels": (
        {"formatting": "trl", "columns": {"prompt": "q", "completion": "r", "kto_tag": "ok"}},
        {"q": "a", "prompt": "no"},
        {"instruction": "a"},
    ),
}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("kind", MAPPED)
def test_rows_are_read_as_the_entry_of_the_run_says(kind, named, tmp_path):
    entry, row, usual = MAPPED[kind]
    entry = {"file_name": "gone.jsonl", **entry}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": entry}))
    datasets = (DatasetReference.of("mine" if named else entry),)
    section = DataSection(datasets=datasets, dataset_dir=tmp_path)
    found = read_prompts(write(tmp_path / "q.jsonl", row, {"messages": [USER]}), section)
    (same,) = read_prompts(write(tmp_path / "u.jsonl", usual))
    assert (found[0].messages, found[0].tools) == (same.messages, same.tools)
    assert found[0].row == row
    assert found[1].messages == (Message("user", "a"),)


def test_the_entry_with_most_of_the_columns_of_a_row_reads_it(tmp_path):
    entries = [
        {"name": "one", "file_name": "a.csv", "columns": {"prompt": "q", "query": "more"}},
        {"name": "two", "file_name": "b.csv", "columns": {"prompt": "q", "system": "rolle"}},
    ]
    section = DataSection(datasets=tuple(map(DatasetReference.of, entries)))
    rows = [{"q": "a", "more": "b"}, {"q": "a", "rolle": "b"}]
    one, two = read_prompts(write(tmp_path / "q.jsonl", *rows), section)
    assert one.messages == (Message("user", "a\nb"),)
    assert two.messages == (Message("system", "b"), Message("user", "a"))


@pytest.mark.parametrize("name", ["instruction", "prompt", "question"])
@pytest.mark.parametrize("more", ["input", "context"])
def test_a_row_is_read_as_training_recognizes_it(name, more, tmp_path):
    path = write(tmp_path / "q.jsonl", {name: "a", more: "b", "response": "c"})
    section = DataSection(datasets=(DatasetReference.of(str(path)),))
    (example,) = training_examples(section)
    assert read_prompts(path)[0].messages == example.messages[:-1] == (Message("user", "a\nb"),)


def test_a_dataset_that_the_run_has_lost_is_named(tmp_path, caplog):
    section = DataSection(datasets=(DatasetReference("mine"),), dataset_dir=tmp_path)
    read_prompts(write(tmp_path / "q.txt", "Hi"), section)
    assert not caplog.text  # no row is read
    read_prompts(write(tmp_path / "q.jsonl", {"prompt": "Hi"}), section)
    assert "dataset 'mine' of the run is not in" in caplog.text


def test_nulls_of_a_columnar_file_are_no_part_of_functions(tmp_path):
    schemas = [
        {"name": name, "parameters": {"type": "object", "properties": {key: {"type": "string"}}}}
        for name, key in (("a", "x"), ("b", "y"))
    ]
    rows = [{"prompt": "Hi", "tools": [schema]} for schema in schemas]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "q.parquet")
    assert [p.tools for p in read_prompts(tmp_path / "q.parquet")] == [(each,) for each in schemas]


def test_a_system_message_goes_where_there_is_none(tmp_path):
    own = {"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "a"}]}
    one, two = read_prompts(write(tmp_path / "q.jsonl", {"prompt": "Hi"}, own))
    assert one.with_system("Be brief.").messages[0] == Message("system", "Be brief.")
    assert two.with_system("Be brief.") == two
    assert one.with_system(None) == one


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "Expecting property name"),
        ("[1]", "expected an object, got"),
        ({"txt": "a"}, r"expected one of the keys 'messages', .*'question' \(keys found: txt\)"),
        ({"prompt": 3}, "'prompt': expected text, got"),
        ({"prompt": " "}, "the prompt is empty"),
        ({"prompt": "", "completion": "a"}, "the prompt is empty"),
        ({"prompt": "a", "finish_reason": "b"}, "the key 'finish_reason' is used for the"),
        ({"prompt": "a", "answer": "b", "expected": "c"}, "the key 'answer' is used for the resp"),
        ({"messages": []}, "expected a list of turns"),
        ({"messages": [{"role": "usr", "content": "a"}]}, "unknown role 'usr'"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "the last message is of the ass"),
    ],
)
def test_a_line_that_is_no_prompt_is_named_with_its_reason(row, reason, tmp_path):
    path = write(tmp_path / "q.jsonl", {"prompt": "Hi"}, row)
    with pytest.raises(DataError, match=rf"q\.jsonl: line 2: .*{reason}"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "prompts cannot be read: No such file"),
        ("folder", "prompts cannot be read: not a regular file"),
        (b"", "contains no prompt; expected one per line"),
        (b"\n \n", "contains no prompt"),
        (b"Hi\n\xff\xfe\n", "line 2: byte 0xff is not UTF-8 text"),
        (b"Hi\0\n", "line 1: a NUL character, so this is not a text file"),
    ],
)
def test_a_file_without_prompts_is_refused(content, reason, tmp_path):
    path = tmp_path / "q.txt"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=reason):
        read_prompts(path)
