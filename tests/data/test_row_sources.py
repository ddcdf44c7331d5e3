"""Files, folders and hub datasets as sources of rows."""

import json
import socket

import pytest

from surefoot.data.example import BrokenRow
from surefoot.data.rows._remote_rows import Hub
from surefoot.data.rows._row_sources import Files, find_files
from surefoot.errors import DataError


@pytest.fixture
def folder(tmp_path):
    """A folder of two files, a hidden one, and a folder."""
    (tmp_path / "b.jsonl").write_text('{"n": 2}\noops\n')
    (tmp_path / "a.jsonl").write_text('{"n": 0}\n{"n": 1}\n')
    (tmp_path / ".hidden.txt").write_text("x")
    (tmp_path / "sub").mkdir()
    return tmp_path


def test_a_folder_is_read_file_by_file_in_the_order_of_names(folder):
    rows = list(find_files(folder).rows())
    assert rows[:3] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert isinstance(rows[3], BrokenRow)
    assert rows[3].index == 3
    assert rows[3].reason.startswith("b.jsonl: line 2 is not valid JSON")


def test_a_source_says_what_it_is(folder):
    assert str(find_files(folder)) == f"{folder / 'a.jsonl'} and 1 more"
    assert str(find_files(folder / "a.jsonl")) == str(folder / "a.jsonl")


def test_endings_may_be_in_capitals(tmp_path):
    (tmp_path / "A.JSONL").write_text('{"n": 0}\n')
    assert list(find_files(tmp_path / "A.JSONL").rows()) == [{"n": 0}]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no.json", "no file or folder"),
        ("sub", "folder .*sub contains no files"),
        ("", r"contains files of several kinds: \.jsonl, \.md"),
        (
            "c.md",
            "c.md: expected a file of one of the kinds json, jsonl, csv, parquet, tsv, txt",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(folder, name, reason):
    (folder / "c.md").write_text("# hi")
    with pytest.raises(DataError, match=reason):
        find_files(folder / name)


TRAIN, TEST, VALID = "train-00000-of-00001", "test-0", "validation"


@pytest.mark.parametrize(
    ("names", "kept", "left"),
    [
        ((TRAIN, TEST, VALID), (TRAIN,), "test-0.jsonl, validation.jsonl"),
        (("train", "dev", "more"), ("train",), "dev.jsonl, more.jsonl"),
        (("rows", "my_eval"), ("rows",), "my_eval.jsonl"),
        (("data/training-1", "data/training-2", "data/val"), ("data/training-1", "data/training-2"),
         "data/val.jsonl"),
        (("train/0", "train/1", "test/0"), ("train/0", "train/1"), "test/0.jsonl"),
    ],
)  # fmt: skip
def test_a_folder_with_splits_is_read_without_those_for_evaluation(tmp_path, names, kept, left):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"in": name}) + "\n")
    (tmp_path / "README.md").write_text("---\n---\n")
    source = find_files(tmp_path)
    assert [row["in"] for row in source.rows()] == list(kept)
    (remark,) = source.remarks
    assert remark.endswith(f"; not {left}")
    for split in {"test": TEST, "validation": VALID} if TEST in names else {}:
        (row,) = find_files(tmp_path, split).rows()
        assert row["in"] == {"test": TEST, "validation": VALID}[split]


@pytest.mark.parametrize(
    "names", [("a", "b"), ("train", "more"), ("test-1", "dev-2"), ("contest", "trains"), ("test",)]
)
def test_a_folder_without_such_a_choice_is_read_as_a_whole(tmp_path, names):
    for name in names:
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    source = find_files(tmp_path)
    assert len(list(source.rows())) == len(names)
    assert source.remarks == ()


def test_a_split_that_a_folder_does_not_have_is_named_with_those_that_it_has(tmp_path):
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="no split 'validation'; its files are of train, test"):
        find_files(tmp_path, "validation")
    with pytest.raises(DataError, match=r"train.jsonl has no splits, so not 'test'"):
        find_files(tmp_path / "train.jsonl", "test")


def test_folders_in_a_folder_are_named(tmp_path):
    (tmp_path / "en").mkdir()
    (tmp_path / "de").mkdir()
    with pytest.raises(DataError, match="contains no files, but folders; name one: de, en"):
        find_files(tmp_path)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 841823\n"


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt"])
@pytest.mark.parametrize(
    ("content", "what"),
    [
        (POINTER.encode(), "a pointer of Git LFS, not the file itself; get it: git lfs pull"),
        (b"\x1f\x8b\x08\x00abc", "compressed by gzip; .* gunzip"),
        (b"PK\x03\x04abcdefgh", "a ZIP archive or a sheet of Excel"),
        (b"\xef\xbb\xbf<!DOCTYPE html><title>Sign in</title>", "a page of HTML"),
        (b"\n<HTML>", "a page of HTML"),
    ],
)
def test_a_file_that_is_something_else_is_named_as_what_it_is(tmp_path, suffix, content, what):
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(content)
    if suffix == ".txt" and "HTML" in what:
        assert list(find_files(path).rows()), "somebody may want to train on it"
        return
    with pytest.raises(DataError, match=rf"rows\{suffix}: is {what}"):
        list(find_files(path).rows())


@pytest.mark.parametrize(("suffix", "unpack"), [(".gz", "gunzip"), (".zst", "unzstd")])
def test_a_compressed_file_says_how_it_is_unpacked(tmp_path, suffix, unpack):
    path = tmp_path / f"rows.jsonl{suffix}"
    path.write_bytes(b"abc")
    with pytest.raises(DataError, match=rf"is compressed; unpack it first: {unpack} rows.jsonl"):
        find_files(path)


def test_a_file_that_goes_away_is_an_error(folder):
    source = find_files(folder / "a.jsonl")
    (folder / "a.jsonl").unlink()
    with pytest.raises(DataError, match=r"cannot read .*a.jsonl: No such file"):
        list(source.rows())
    with pytest.raises(DataError, match=r"cannot read .*a.jsonl: No such file"):
        source.content_hash()


def test_the_content_hash_knows_every_byte_and_where_files_end(folder, tmp_path):
    source = find_files(folder)
    hashes = {source.content_hash()}
    (folder / "b.jsonl").write_text('{"n": 3}\noops\n')
    hashes.add(source.content_hash())
    (folder / "b.jsonl").write_text("oops\n")
    (folder / "a.jsonl").write_text('{"n": 0}\n{"n": 1}\n{"n": 2}\n')
    hashes.add(source.content_hash())
    assert len(hashes) == 3
    assert source.content_hash() == Files(source.paths).content_hash()


def test_a_dataset_in_the_hubs_form_is_read_by_subset_and_split(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for name in ("train", "test"):
        text = "".join(json.dumps({"n": n, "split": name}) + "\n" for n in range(3))
        (tmp_path / "hub").mkdir(exist_ok=True)
        (tmp_path / "hub" / f"{name}.jsonl").write_text(text)
    source = Hub("huggingface", str(tmp_path / "hub"), split="test")
    assert list(source.rows()) == [{"n": n, "split": "test"} for n in range(3)]
    assert source.content_hash() == source.content_hash()
    assert source.content_hash() != Hub("huggingface", str(tmp_path / "hub")).content_hash()
    with pytest.raises(DataError, match=r"cannot load dataset .*hub \(huggingface\): .*dev"):
        list(Hub("huggingface", str(tmp_path / "hub"), split="dev").rows())


def test_a_hub_dataset_that_is_not_there_says_what_to_check(tmp_path):
    with pytest.raises(
        DataError, match=r"cannot load dataset nobody/nothing .*HF_HUB_OFFLINE is set"
    ):
        Hub("huggingface", "nobody/nothing").content_hash()


def test_a_hub_without_an_address_is_said_at_once(monkeypatch):
    def no_host(*_):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("surefoot.data.rows._remote_rows.socket.getaddrinfo", no_host)
    monkeypatch.setattr("surefoot.data.rows._remote_rows.getproxies", dict)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with pytest.raises(DataError, match=r"cannot load dataset a/b .*: Name or service not known"):
        Hub("huggingface", "a/b").content_hash()
