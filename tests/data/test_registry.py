"""dataset_info.json, read strictly."""

import json

import pytest

from surefoot.data.rows._remote_rows import Hub
from surefoot.data.rows._row_sources import Files
from surefoot.data.rows.catalog import Catalog
from surefoot.data.rows.formats._alpaca import Alpaca
from surefoot.data.rows.formats._turns import ShareGPT
from surefoot.data.section import DataSection
from surefoot.errors import DataError


@pytest.fixture
def entry(tmp_path):
    """A function that reads one entry, ``name``, of a registry beside ``rows.json``."""
    (tmp_path / "rows.json").write_text("[]")

    def read(**raw):
        raw = raw if any("url" in key for key in raw) else {"file_name": "rows.json", **raw}
        (tmp_path / "dataset_info.json").write_text(json.dumps({"name": raw}))
        return Catalog(DataSection(datasets=("name",), dataset_dir=tmp_path)).entry("name")

    return read


def test_the_smallest_entry_is_an_alpaca_file(entry, tmp_path):
    found = entry()
    assert found.format == Alpaca()
    assert found.source == Files((tmp_path / "rows.json",))
    assert found.columns == ("instruction",)
    assert found.num_samples is None


def test_columns_that_are_not_listed_keep_their_names(entry):
    found = entry(columns={"response": "answer", "system": None}, num_samples=5)
    assert found.format == Alpaca(response="answer", system=None)
    assert found.columns == ("instruction", "answer")
    assert found.num_samples == 5


def test_tags_and_ranking(entry):
    found = entry(
        formatting="sharegpt",
        ranking=True,
        columns={"messages": "chat", "chosen": "good", "rejected": "bad"},
        tags={"role_tag": "role", "user_tag": "user"},
    )
    assert found.format == ShareGPT(
        messages="chat",
        chosen="good",
        rejected="bad",
        role_tag="role",
        user_tag="user",
        ranking=True,
    )
    assert found.columns == ("chat", "good", "bad")


def test_a_path_may_be_a_folder_or_absolute(entry, tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "1.csv").write_text("a\n")
    assert entry(file_name="parts").source == Files((tmp_path / "parts" / "1.csv",))
    path = tmp_path / "rows.json"
    assert entry(file_name=str(path), formatting="openai").source == Files((path,))


def test_hub_datasets(entry):
    found = entry(
        hf_hub_url="a/b",
        subset="en",
        split="test",
        folder="data",
        om_hub_url="c/d",
        formatting="alpaca",
    )
    assert found.source == Hub("huggingface", "a/b", "en", "test", "data")
    known = {"columns": {"prompt": "q"}}  # else its rows are looked at
    assert entry(ms_hub_url="a/b", **known).source == Hub("modelscope", "a/b")
    found = entry(hf_hub_url="a/b", ms_hub_url="c/d", **known)
    assert found.source == Hub("huggingface", "a/b")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"colums": {}}, r"name: unknown key 'colums' \(did you mean columns\?\)"),
        ({"zzz": 1}, r"name: unknown key 'zzz' \(known: file_name, cloud_file_name"),
        ({"formatting": "sharegtp"}, r"name.formatting: expected one of alpaca, .* mean sharegpt"),
        ({"formatting": 3}, "name.formatting: expected text, got int 3"),
        ({"ranking": "yes"}, "name.ranking: expected true or false, got str 'yes'"),
        ({"num_samples": 0}, "name.num_samples: must be at least 1, got 0"),
        ({"num_samples": True}, "name.num_samples: expected a whole number, got bool True"),
        ({"columns": ["a"]}, "name.columns: expected an object, got list"),
        ({"columns": {"promt": "a"}}, r"columns: unknown name 'promt' \(did you mean prompt\?\)"),
        ({"columns": {"turns": "a"}}, r"'turns' \(alpaca has chosen, history, images"),
        ({"columns": {"prompt": None}}, "columns.prompt: expected a name, got null"),
        ({"columns": {"query": ""}}, "columns.query: expected a name, got str ''"),
        ({"columns": {"chosen": "a"}}, 'columns.chosen: is read only with "ranking": true'),
        ({"columns": {"videos": "a"}}, r"columns.videos: only text and pictures .* not videos"),
        ({"columns": {"main": "a"}}, "columns: unknown name 'main'"),
        ({"columns": {"ranking": "a"}}, "columns: unknown name 'ranking'"),
        ({"tags": {"role_tag": "a"}}, r"tags: unknown name 'role_tag' \(alpaca has no tags\)"),
        ({"formatting": "openai", "tags": {"role_tag": None}}, "tags.role_tag: expected a name"),
        ({"formatting": "openai", "tags": {"messages": "a"}}, "tags: unknown name 'messages'"),
        ({"file_name": None}, "name: needs a file_name, hf_hub_url or ms_hub_url"),
        ({"file_name": "no.json"}, r"name.file_name: no file or folder .*no.json"),
        ({"file_name": "a.json", "hf_hub_url": "a/b"}, "either file_name or hf_hub_url, not both"),
        ({"split": "test"}, "name.file_name: .* has no splits, so not 'test'"),
        ({"subset": "en"}, "name.subset: only hub datasets have one"),
        ({"script_url": "a"}, "name: script_url: a script can run any code, so it is not run"),
        ({"om_hub_url": "a"}, "name: om_hub_url: the OpenMind hub is not read"),
    ],
)
def test_a_wrong_entry_says_what_is_wrong(entry, raw, reason):
    with pytest.raises(DataError, match=reason):
        entry(**raw)


def test_an_entry_that_is_not_used_may_be_anything(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    entries = {"good": {"file_name": "a.txt"}, "bad": {"columns": {"images": "images"}}, "worse": 1}
    (tmp_path / "dataset_info.json").write_text(json.dumps(entries))
    registry = Catalog(DataSection(datasets=("any",), dataset_dir=tmp_path))
    assert registry.entry("good").name == "good"
    with pytest.raises(DataError, match="worse: expected an object, got int 1"):
        registry.entry("worse")


def test_an_unknown_dataset_is_guessed_or_the_known_ones_are_named(tmp_path):
    entries = {"alpaca_en": {}, "identity": {}, **{f"set{i}": {} for i in range(20)}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(entries))
    registry = Catalog(DataSection(datasets=("any",), dataset_dir=tmp_path))
    with pytest.raises(DataError, match=r"'alpca_en' is not in .*\(did you mean alpaca_en\?\)"):
        registry.entry("alpca_en")
    with pytest.raises(DataError, match=r"\(it has alpaca_en, identity, set0, .*, \.\.\.\)"):
        registry.entry("zzzzz")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, r"no dataset_info.json in .*; set data.dataset_dir to the folder that contains it"),
        ("[]", "dataset_info.json: expected an object, got list"),
        ('{\n"a": }', "dataset_info.json: not valid JSON: Expecting value: line 2"),
        ("folder", r"cannot read .*dataset_info.json: not a regular file"),
        ('{"a": {}, "a": {}}', "dataset_info.json: not valid JSON: the key 'a' occurs twice"),
    ],
)
def test_a_registry_that_cannot_be_read(tmp_path, text, reason):
    if text == "folder":
        (tmp_path / "dataset_info.json").mkdir()
    elif text is not None:
        (tmp_path / "dataset_info.json").write_text(text)
    with pytest.raises(DataError, match=reason):
        Catalog(DataSection(datasets=("any",), dataset_dir=tmp_path)).entry("any")
