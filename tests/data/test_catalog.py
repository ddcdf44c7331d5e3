"""Datasets without ceremony: a file, a folder, a hub id, an entry in the recipe; known columns."""

import json
import os
import re

import datasets
import pytest
from ruamel.yaml import YAML

from surefoot.data.rows import registry
from surefoot.data.rows._readers import READERS
from surefoot.data.rows._remote_rows import Hub
from surefoot.data.rows.catalog import Catalog, check_rows
from surefoot.data.rows.rows import read_examples
from surefoot.errors import DataError, RecipeError
from surefoot.recipe.recipe import dump, load, read
from surefoot.schema.locations import DATA_FILES

REST = {"model": {"path": "m"}, "stage": "sft", "train": {"output_dir": "o", "max_steps": 1}}
QUESTION = {"instruction": "q", "output": "a"}


def section(base, *names, **more):
    return read({**REST, "data": {"datasets": list(names), **more}}, base=base).data


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def said(entry):
    return [[(m.role, m.content) for m in example.messages] for example in read_examples(entry)]


ASKED = [[("user", "q"), ("assistant", "a")]]
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


@pytest.mark.parametrize(
    "row",
    [
        QUESTION,
        {"prompt": "q", "completion": "a"},
        {"prompt": "q", "response": "a"},
        {"question": "q", "answer": "a"},
        {"instruction": "q", "response": "a"},
        {"prompt": TURNS[:1], "completion": TURNS[1:]},
        {"messages": TURNS},
        {"messages": TURNS, "prompt": "q", "id": 3},
        {"conversations": TURNS},
        {"messages": SHAREGPT},
        {"conversations": SHAREGPT},
        {"messages": json.dumps(TURNS)},
        {**QUESTION, "text": "### q ### a", "messages": None},
    ],
    ids=lambda row: "-".join(row),
)
def test_a_file_is_a_dataset_whose_columns_are_known(tmp_path, row):
    write(tmp_path / "my.jsonl", row)
    (entry,) = Catalog(section(tmp_path, "my.jsonl")).entries
    assert said(entry) == ASKED
    assert entry.name == "my.jsonl"


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": [{**TURNS[1], "content": "b"}]},
        {"prompt": "q", "chosen": TURNS, "rejected": [TURNS[0], {**TURNS[1], "content": "b"}]},
        {"chosen": TURNS, "rejected": [TURNS[0], {**TURNS[1], "content": "b"}]},
        {"messages": TURNS[:1], "chosen": TURNS[1], "rejected": {**TURNS[1], "content": "b"}},
        {"conversations": SHAREGPT[:1], "chosen": SHAREGPT[1], "rejected": "b"},
    ],
    ids=lambda row: "-".join(row),
)
def test_two_responses_are_known_by_their_columns(tmp_path, row):
    write(tmp_path / "my.jsonl", row)
    (entry,) = Catalog(section(tmp_path, "my.jsonl")).entries
    (example,) = read_examples(entry)
    assert [(m.role, m.content) for m in example.messages] == [("user", "q")]
    assert (example.chosen.content, example.rejected.content) == ("a", "b")


def test_texts_and_marked_completions_are_known_too(tmp_path):
    write(tmp_path / "text.jsonl", {"text": "Once."})
    write(tmp_path / "kto.jsonl", {"prompt": "q", "completion": "a", "label": False})
    text, kto = Catalog(section(tmp_path, "text.jsonl", "kto.jsonl")).entries
    assert [example.text for example in read_examples(text)] == ["Once."]
    assert [example.label for example in read_examples(kto)] == [False]


def test_responses_to_different_prompts_and_without_one_are_broken_rows(tmp_path):
    other = [{"role": "user", "content": "?"}, TURNS[1]]
    write(tmp_path / "a.jsonl", *[{"chosen": TURNS, "rejected": other}] * 11)
    write(tmp_path / "b.jsonl", *[{"chosen": "x", "rejected": "y"}] * 11)
    data = section(tmp_path, "a.jsonl", "b.jsonl")
    with pytest.raises(DataError) as caught:
        check_rows(Catalog(data).entries, data)
    assert "'chosen' and 'rejected' answer different prompts" in str(caught.value)
    assert "a response without a prompt; add a column 'prompt'" in str(caught.value)


@pytest.mark.parametrize("response", [3, True, {"content": "a"}])
def test_a_response_that_is_no_text_is_a_broken_row(tmp_path, response):
    write(tmp_path / "a.jsonl", *[{"prompt": "q", "chosen": response, "rejected": "b"}] * 11)
    data = section(tmp_path, "a.jsonl")
    with pytest.raises(DataError, match="column 'chosen'"):
        check_rows(Catalog(data).entries, data)


def test_an_entry_may_stand_in_the_recipe(tmp_path):
    write(tmp_path / "rows" / "x.jsonl", {"q": "q", "a": "a"})
    entry = {"file_name": "rows/x.jsonl", "columns": {"prompt": "q", "response": "a"}}
    data = section(tmp_path, entry, eval_datasets=[{**entry, "name": "again"}])
    assert [each.name for each in Catalog(data).entries] == ["x.jsonl", "again"]
    assert [said(each) for each in Catalog(data).entries] == [ASKED, ASKED]
    assert said(Catalog(data).entry("again")) == ASKED


def test_a_recipe_with_files_and_entries_reads_back_equal_from_anywhere(tmp_path):
    write(tmp_path / "x.jsonl", QUESTION)
    first = read(
        {**REST, "data": {"datasets": ["x.jsonl", {"name": "y", "file_name": "x.jsonl"}]}},
        base=tmp_path,
    )
    copy = tmp_path / "elsewhere" / "recipe.yaml"
    copy.parent.mkdir()
    copy.write_text(dump(first))
    assert load(copy) == first
    assert [said(entry) for entry in Catalog(load(copy).data).entries] == [ASKED, ASKED]


def test_names_with_commas_are_several(tmp_path):
    write(tmp_path / "x.jsonl", QUESTION)
    write(tmp_path / "y.jsonl", QUESTION)
    data = read({**REST, "data": {"datasets": "x.jsonl, y.jsonl"}}, base=tmp_path).data
    assert [entry.name for entry in Catalog(data).entries] == ["x.jsonl", "y.jsonl"]


def test_a_name_of_dataset_info_is_no_path_even_if_there_is_one(tmp_path):
    write(tmp_path / "sums" / "1.jsonl", {"instruction": "wrong", "output": "x"})
    write(tmp_path / "data" / "right.jsonl", QUESTION)
    write(tmp_path / "data" / "dataset_info.json", {"sums": {"file_name": "right.jsonl"}})
    assert said(Catalog(section(tmp_path, "sums")).entries[0]) == ASKED
    assert said(Catalog(section(tmp_path, "./sums")).entries[0])[0][0] == ("user", "wrong")


def test_a_folder_that_datasets_saved_is_read(tmp_path):
    rows = datasets.Dataset.from_list([QUESTION] * 3)
    rows.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    both = datasets.DatasetDict({"train": rows, "test": rows.select([0])})
    both.save_to_disk(str(tmp_path / "both"))
    data = section(
        tmp_path,
        "./saved",
        "./both",
        {"name": "tests", "file_name": "both", "split": "test"},
    )
    assert [len(said(entry)) for entry in Catalog(data).entries] == [3, 3, 1]
    wrong = section(tmp_path, {"file_name": "both", "split": "dev"})
    with pytest.raises(DataError, match=r"no split 'dev'; .* one of train, test"):
        Catalog(wrong).entries  # noqa: B018


def test_a_hub_id_is_a_dataset_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "first_values", lambda rows: {})
    (entry,) = Catalog(section(tmp_path, "tatsu-lab/alpaca")).entries
    assert entry.source == Hub("huggingface", "tatsu-lab/alpaca")
    assert entry.name == "tatsu-lab/alpaca"


def test_a_name_with_a_null_byte_is_a_file_that_is_not_there(tmp_path):
    write(tmp_path / "data" / "dataset_info.json", {"sums": {"file_name": "\0.json"}})
    with pytest.raises(DataError, match=r"sums.file_name: no file or folder"):
        Catalog(section(tmp_path, "sums")).entries  # noqa: B018


def test_all_problems_of_the_data_are_said_at_once(tmp_path):
    write(tmp_path / "data" / "dataset_info.json", {"sums": {"file_name": "gone.json"}})
    write(tmp_path / "data" / "near.jsonl", QUESTION)
    wrong = {"file_name": "x", "z": 1}
    data = section(tmp_path, "sums", "summs", "no.jsonl", "near.jsonl", wrong, "./folder")
    with pytest.raises(DataError) as caught:
        Catalog(data).entries  # noqa: B018
    lines = str(caught.value).splitlines()
    assert len(lines) == 6
    assert "'./folder': no such file or folder" in lines[5]
    assert "sums.file_name: no file or folder" in lines[0]
    assert "'summs' is not in" in lines[1]
    assert "did you mean sums?" in lines[1]
    assert "'no.jsonl': no such file" in lines[2]
    assert f"did you mean {tmp_path}/data/near.jsonl?" in lines[3]
    assert "unknown key 'z'" in lines[4]


def test_columns_of_all_datasets_are_checked_before_any_is_encoded(tmp_path):
    write(tmp_path / "a.jsonl", {"q": 1})
    write(tmp_path / "b.jsonl", {"r": 1})
    data = section(tmp_path, "a.jsonl", "b.jsonl")
    with pytest.raises(DataError) as caught:
        check_rows(Catalog(data).entries, data)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "dataset 'a.jsonl'",
        "dataset 'b.jsonl'",
    ]
    assert f"datasets: [{{file_name: {tmp_path}/b.jsonl, columns: {{prompt: r}}}}]" in str(
        caught.value
    )


@pytest.mark.parametrize(
    "row", [{"frage": "q", "antwort": "a", "id": 3}, {"id": 3, "die Frage": "q", "Antwort": "a"}]
)
def test_columns_with_other_names_give_the_line_that_names_them(tmp_path, row):
    write(tmp_path / "f.jsonl", {**row, "id": None}, row)
    with pytest.raises(DataError, match="no column has a usual name") as caught:
        check_rows(Catalog(data := section(tmp_path, "f.jsonl")).entries, data)
    line = re.search(r"datasets: \[.*?\}\}\]", str(caught.value))[0]
    cured = section(tmp_path, *YAML(typ="safe").load(f"{{{line}}}")["datasets"])
    assert said(Catalog(cured).entries[0]) == ASKED * 2 if row.get("frage") else True


def test_a_misspelled_column_is_named_with_what_it_should_be(tmp_path):
    write(tmp_path / "f.jsonl", {"promt": "q", "completion": "a"})
    with pytest.raises(DataError, match="did you mean prompt by promt"):
        check_rows(Catalog(data := section(tmp_path, "f.jsonl")).entries, data)


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ";"), ("b.csv", "\t"), ("c.tsv", "\t")])
def test_values_are_separated_as_the_names_are(tmp_path, name, mark):
    text = f'question{mark}answer\n"q, or{mark} p"{mark}a;b\n'.replace("a;b", '"a;b"')
    (tmp_path / name).write_text(text)
    (entry,) = Catalog(section(tmp_path, name)).entries
    assert said(entry) == [[("user", f"q, or{mark} p"), ("assistant", "a;b")]]


def test_a_csv_file_without_names_says_what_to_put_before_its_rows(tmp_path):
    (tmp_path / "a.csv").write_text("Cleo wants 11 cups.,11 x cups\nAda wants 2.,2 x cups\n")
    with pytest.raises(DataError, match="the first line is a row, put one with names before it"):
        check_rows(Catalog(data := section(tmp_path, "a.csv")).entries, data)


def test_a_folder_without_a_slash_and_a_misspelled_file_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "multi" / "a.jsonl", QUESTION)
    write(tmp_path / "ok.jsonl", QUESTION)
    with pytest.raises(DataError, match=r"'multi' is not in .*did you mean the folder ./multi\?"):
        Catalog(section(tmp_path, "multi")).entries  # noqa: B018
    with pytest.raises(DataError, match=r"did you mean ok.jsonl\?\); looked in ") as caught:
        Catalog(section(tmp_path, "okk.jsonl")).entries  # noqa: B018
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("unit", "texts"),
    [("file", ["one\n two\n\n\nthree"]), ("paragraph", ["one\n two", "three"]),
     ("line", ["one", " two", "three"])],
)  # fmt: skip
def test_a_document_of_a_text_file_is_what_the_recipe_says(tmp_path, unit, texts):
    (tmp_path / "a.txt").write_bytes(b"\n".join([b"one\r", b" two\r", b"\r", b"", b"three", b""]))
    (entry,) = Catalog(section(tmp_path, "a.txt", text_unit=unit)).entries
    assert [example.text for example in read_examples(entry)] == texts
    assert ("one document" in "".join(entry.source.remarks)) == (unit == "file")
    hashes = {
        Catalog(section(tmp_path, "a.txt", text_unit=each)).entries[0].source.content_hash()
        for each in ("file", "paragraph", "line")
    }
    assert len(hashes) == 3


def test_without_a_registry_a_name_says_what_else_could_be_named(tmp_path):
    with pytest.raises(DataError, match=r"no dataset_info.json in .*data; .* rows.jsonl or a hub"):
        Catalog(section(tmp_path, "sums")).entries  # noqa: B018


def test_a_compressed_file_is_no_name_of_a_registry(tmp_path):
    with pytest.raises(DataError, match=r"'rows.jsonl.gz': is compressed; .* gunzip rows.jsonl.gz"):
        Catalog(section(tmp_path, "rows.jsonl.gz")).entries  # noqa: B018


@pytest.mark.parametrize("named", ["pipe.jsonl", "./folder"])
def test_a_pipe_is_not_waited_for(tmp_path, named):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    os.mkfifo(tmp_path / "folder" / "a.jsonl")
    with pytest.raises(DataError, match=r"is neither a file nor a folder|contains no files"):
        Catalog(section(tmp_path, named)).entries  # noqa: B018


def test_a_registry_that_is_a_pipe_is_not_waited_for(tmp_path):
    (tmp_path / "data").mkdir()
    os.mkfifo(tmp_path / "data" / "dataset_info.json")
    with pytest.raises(DataError, match="not a regular file"):
        Catalog(section(tmp_path, "sums")).entries  # noqa: B018


@pytest.mark.parametrize("wrong", [3, [3], [""], [{"columns": {}}]])
def test_what_names_no_dataset_says_what_does(tmp_path, wrong):
    with pytest.raises(RecipeError, match=r"data.datasets\[0\]: (expected a name|an entry needs)"):
        read({**REST, "data": {"datasets": wrong}}, base=tmp_path)


def test_a_recipe_knows_a_file_by_the_kinds_that_are_read():
    assert set(DATA_FILES) == set(READERS)


def test_the_hub_of_the_section_is_that_of_ids_and_of_entries_that_name_both(tmp_path, monkeypatch):
    monkeypatch.setattr(Hub, "rows", lambda _: iter([QUESTION]))
    info = {"both": {"hf_hub_url": "a/b", "ms_hub_url": "c/d"}, "one": {"hf_hub_url": "a/b"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    for hub, both in (("huggingface", "a/b"), ("modelscope", "c/d")):
        found = Catalog(section(tmp_path, "both", "one", "e/f", dataset_dir=".", hub=hub))
        sources = [entry.source for entry in found.entries]
        assert sources == [Hub(hub, both), Hub("huggingface", "a/b"), Hub(hub, "e/f")]
