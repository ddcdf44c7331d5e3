"""Rows of files on a server, of files that match a pattern, and of datasets of both hubs."""

import json
import os
import subprocess
import sys

import fsspec
import pytest

from hub_server import serving
from surefoot.data.rows.catalog import Catalog
from surefoot.data.rows.registry import read_entry
from surefoot.data.section import DataSection
from surefoot.errors import DataError
from surefoot.schema.locations import DatasetReference
from surefoot.storage import remote as download

ROWS = [{"instruction": f"q{n}", "output": f"a{n}"} for n in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    for name in download.OFFLINE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
    with serving() as (found, url):
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", url)
        found.url = url
        found.repositories[("files", "rows.jsonl")] = LINES
        yield found


def rows(entry, folder):
    return list(read_entry("d", entry, folder, "here").source.rows())


@pytest.mark.parametrize("key", ["file_name", "cloud_file_name"])
def test_a_file_on_a_server_is_downloaded_once(hub, tmp_path, monkeypatch, key):
    entry = {key: f"{hub.url}/rows.jsonl", "formatting": "alpaca"}
    assert rows(entry, tmp_path) == ROWS
    assert rows(entry, tmp_path) == ROWS
    assert len(hub.served) == 1
    hub.repositories[("files", "rows.jsonl")] = LINES * 2
    assert rows(entry, tmp_path) == ROWS * 2, "and again when it has changed"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = len(hub.asked)
    assert rows(entry, tmp_path) == ROWS * 2
    assert len(hub.asked) == asked


def test_a_copy_that_is_not_what_arrived_is_downloaded_again(hub, tmp_path, monkeypatch, caplog):
    entry = {"file_name": f"{hub.url}/rows.jsonl", "formatting": "alpaca"}
    assert rows(entry, tmp_path) == ROWS
    (copy,) = (tmp_path / "cache").rglob("*rows.jsonl")
    for number, data in enumerate((LINES[:-9], LINES.replace(b"a0", b"b0"), b""), 2):
        copy.write_bytes(data)
        assert rows(entry, tmp_path) == ROWS
        assert len(hub.served) == number
    assert "is damaged or gone; downloading it again" in caplog.text
    copy.write_bytes(b"")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=r"rows\.jsonl"):
        rows(entry, tmp_path)


def test_a_signed_address_is_read_without_its_head(hub, tmp_path):
    hub.refuses_head = True
    entry = {"file_name": f"{hub.url}/rows.jsonl?signature=x", "formatting": "alpaca"}
    assert rows(entry, tmp_path) == ROWS
    with pytest.raises(DataError, match=r"no.jsonl: .*404"):
        rows({**entry, "file_name": f"{hub.url}/no.jsonl"}, tmp_path)


def test_a_download_that_was_interrupted_is_resumed(hub, tmp_path):
    many = LINES * 10_000
    hub.repositories[("files", "rows.jsonl")] = many
    hub.drops["rows.jsonl"] = 500_000
    entry = {"file_name": f"{hub.url}/rows.jsonl", "formatting": "alpaca"}
    with pytest.raises(DataError, match="start again to resume"):
        rows(entry, tmp_path)
    assert len(rows(entry, tmp_path)) == 30_000
    (first, *_), (_, start) = hub.served[0], hub.served[-1]
    assert first == "rows.jsonl"
    assert 0 < start <= 500_000


def test_what_is_wrong_with_a_remote_file_is_said(hub, tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*/no.jsonl: .*404"):
        rows({"file_name": f"{hub.url}/no.jsonl", "formatting": "alpaca"}, tmp_path)
    with pytest.raises(DataError, match=r"host 127.0.0.1:9"):
        rows({"file_name": "http://127.0.0.1:9/a.jsonl", "formatting": "alpaca"}, tmp_path)
    with pytest.raises(DataError, match="expected a file of one of the kinds"):
        rows({"file_name": f"{hub.url}/page.html", "formatting": "alpaca"}, tmp_path)


def test_files_of_an_object_store_are_copied_and_read(hub, tmp_path, monkeypatch):
    store = fsspec.filesystem("memory")
    for number in (1, 0):
        store.pipe_file(f"/bucket/rows/{number}.jsonl", LINES)
    store.pipe_file("/bucket/rows/README.md", b"hi")
    try:
        entry = {"cloud_file_name": "memory://bucket/rows", "formatting": "alpaca"}
        assert rows(entry, tmp_path) == ROWS * 2
        store.pipe_file("/bucket/rows/0.jsonl", LINES * 2)
        assert rows(entry, tmp_path) == ROWS * 3
        with monkeypatch.context() as offline:
            offline.setenv("HF_HUB_OFFLINE", "1")
            assert rows(entry, tmp_path) == ROWS * 3, "no file of before beside its successor"
        entry["cloud_file_name"] += "/1.jsonl"
        assert rows(entry, tmp_path) == ROWS
        with pytest.raises(DataError, match="cannot read memory://bucket/none"):
            rows({**entry, "cloud_file_name": "memory://bucket/none"}, tmp_path)
    finally:
        store.rm("/bucket", recursive=True)


def test_a_recipe_names_a_file_on_a_server(hub, tmp_path):
    name = DatasetReference.of(f"{hub.url}/rows.jsonl").located(tmp_path)
    section = DataSection(datasets=(name,), dataset_dir=tmp_path)
    (entry,) = Catalog(section).entries
    assert entry.name == "rows.jsonl"
    assert list(entry.source.rows()) == ROWS
    entry = DatasetReference.of({"file_name": f"{hub.url}/rows.jsonl"})
    assert entry.located(tmp_path).source["file_name"] == f"{hub.url}/rows.jsonl"


def test_a_pattern_means_the_files_that_it_matches(tmp_path):
    for number in (2, 0, 1):
        (tmp_path / f"part-{number}.jsonl").write_text(json.dumps(ROWS[number]) + "\n")
    (tmp_path / "other.jsonl").write_text("{}\n")
    assert rows({"file_name": "part-*.jsonl", "formatting": "alpaca"}, tmp_path) == ROWS
    name = DatasetReference.of("part-?.jsonl").located(tmp_path)
    (entry,) = Catalog(DataSection(datasets=(name,), dataset_dir=tmp_path)).entries
    assert list(entry.source.rows()) == ROWS
    with pytest.raises(DataError, match=r"no file or folder .*none-"):
        rows({"file_name": "none-*.jsonl", "formatting": "alpaca"}, tmp_path)
    (tmp_path / "part-3.csv").write_text("a\n1\n")
    with pytest.raises(DataError, match=r"part-\* matches files of several kinds: .csv, .jsonl"):
        rows({"file_name": "part-*", "formatting": "alpaca"}, tmp_path)


def test_a_dataset_of_modelscope_is_read(hub, tmp_path, monkeypatch):
    pytest.importorskip("modelscope_hub")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "prepared"))
    hub.repositories[("datasets", "owner/rows")] = {"train.jsonl": LINES, "make.py": b"x"}
    entry = {"ms_hub_url": "owner/rows", "formatting": "alpaca"}
    assert rows(entry, tmp_path) == ROWS
    with pytest.raises(DataError, match=r"cannot load dataset owner/none \(modelscope\).* has no"):
        rows({"ms_hub_url": "owner/none", "formatting": "alpaca"}, tmp_path)


PROGRAM = """
import sys
from pathlib import Path
from surefoot.data.rows.registry import read_entry
from surefoot.errors import DataError
entry = {"hf_hub_url": "owner/rows", "formatting": "alpaca"}
for _ in sys.stdin:
    try:
        rows = list(read_entry("d", entry, Path(), "here").source.rows())
        print(len(rows), rows[0], flush=True)
    except DataError as error:
        print(str(error).replace("\\n", " "), flush=True)
"""


def test_a_dataset_of_the_hugging_face_hub_is_verified_before_it_is_read(hub, tmp_path):
    many = LINES * 15_000  # a large file; of a lost connection, up to 10 MB are read again
    hub.repositories[("datasets", "owner/rows")] = {"train.jsonl": many}
    offline = {*download.OFFLINE}
    environment = {k: v for k, v in os.environ.items() if k not in offline}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}

    command, pipes = [sys.executable, "-c", PROGRAM], dict.fromkeys(("stdin", "stdout"), -1)
    with subprocess.Popen(command, env=environment, text=True, bufsize=1, **pipes) as program:

        def read():
            program.stdin.write("again\n")
            return program.stdout.readline()

        hub.damaged["train.jsonl"] = 2
        assert "its sha256 is" in read()
        hub.drops["train.jsonl"] = 500_000
        assert read().strip() == f"45000 {ROWS[0]}"
        program.stdin.close()
    assert [start for name, start in hub.served if name == "train.jsonl"] == [0, 0, 0, 0]
