"""A cache folder is there wholly or not at all, whatever happens to the process or the disk."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import warm
from damage import flip
from surefoot.data.store import cache
from surefoot.data.store.cache import default_folder, find, flattened, load_or_build
from surefoot.errors import DataError
from surefoot.storage import files

ITEMS = [
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "weight": []},
    {"input_ids": [4], "labels": [4], "weight": [9]},
    {"input_ids": np.array([5, 6], np.int64), "labels": (5, 6), "weight": [1]},
]
ROWS = [0, 0, 7]


def add(writer, items, rows):
    writer.append(flattened(items), np.array(rows, np.int64))


def build(writer):
    add(writer, ITEMS[:2], ROWS[:2])
    add(writer, [], [])
    add(writer, ITEMS[2:], ROWS[2:])
    return {"said": "ü"}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def never(writer):
    raise AssertionError("built anew")


def contents(cached):
    store = cached.store
    return [{name: list(v) for name, v in store[i].items()} for i in range(len(store))]


EXPECTED = [{name: list(values) for name, values in item.items()} for item in ITEMS]


def test_what_is_written_is_what_is_read_at_once_and_later(tmp_path):
    first = load_or_build(tmp_path / "a" / "b", "key", build)
    again = load_or_build(tmp_path / "a" / "b", "key", never)
    assert (first.is_new, again.is_new) == (True, False)
    for cached in (first, again):
        assert contents(cached) == EXPECTED
        assert cached.store.rows.tolist() == ROWS
        assert cached.report == {"said": "ü"}
    assert first.store.content == again.store.content
    assert names(tmp_path / "a" / "b") == ["key"]


def test_text_is_kept_as_bytes_beside_tokens(tmp_path):
    texts = [b'{"answer": 7}', b"", "ü".encode()]
    items = [{**item, "columns": text} for item, text in zip(ITEMS, texts, strict=True)]

    def build(writer):
        add(writer, items[:1], [0])
        add(writer, items[1:], [0, 7])
        return {}

    load_or_build(tmp_path, "key", build)
    store = load_or_build(tmp_path, "key", never).store
    assert [bytes(store[i]["columns"]) for i in range(3)] == texts
    assert store.features["columns"].flat.dtype == np.uint8
    assert store.lengths.tolist() == [3, 1, 2]
    with (tmp_path / "key" / "columns.bytes").open("r+b") as file:
        file.truncate(3)
    assert load_or_build(tmp_path, "key", build).is_new


def test_another_fingerprint_is_another_folder_but_equal_items_have_equal_content(tmp_path):
    def of_other_rows(writer):
        add(writer, ITEMS, [0, 1, 7])
        return {}

    one, two = (load_or_build(tmp_path, key, build) for key in ("one", "two"))
    assert two.is_new
    assert one.store.content == two.store.content
    assert one.store.content != load_or_build(tmp_path, "three", of_other_rows).store.content


def test_an_item_is_read_when_it_is_used_and_cannot_be_written(tmp_path):
    load_or_build(tmp_path, "key", build)
    store = load_or_build(tmp_path, "key", never).store
    ids = store[0]["input_ids"]
    assert type(ids) is np.ndarray
    assert ids.dtype == np.int32
    assert not ids.flags.writeable


def test_a_builder_that_fails_leaves_nothing(tmp_path):
    def fail(writer):
        add(writer, ITEMS, ROWS)
        raise DataError("too many broken rows")

    with pytest.raises(DataError, match="too many"):
        load_or_build(tmp_path, "key", fail)
    assert names(tmp_path) == []
    assert load_or_build(tmp_path, "key", build).is_new


def test_a_token_that_is_no_int32_is_refused_not_bent(tmp_path):
    with pytest.raises(OverflowError):
        load_or_build(tmp_path, "key", lambda w: add(w, [{"input_ids": [2**31]}], [0]) or {})


FILES = ["header.json", "rows", "input_ids.tokens", "input_ids.offsets"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["missing", "cut", "longer"])
def test_a_damaged_folder_is_noticed_and_made_anew(tmp_path, caplog, name, how):
    load_or_build(tmp_path, "key", build)
    path = tmp_path / "key" / name
    data = path.read_bytes()
    path.unlink()
    if how != "missing":
        path.write_bytes(data[:-1] if how == "cut" else data + b"\0\0\0\0\0\0\0\0")
    cached = load_or_build(tmp_path, "key", build)
    assert cached.is_new
    assert contents(cached) == EXPECTED
    assert caplog.messages[0].startswith(
        f"{tmp_path / 'key'} is damaged ({'no ' * (how == 'missing')}{name}"
    )
    assert contents(load_or_build(tmp_path, "key", never)) == EXPECTED


@pytest.mark.parametrize("name", ["header.json", "rows", "labels.offsets"])
def test_every_flipped_byte_of_header_and_indexes_is_noticed(tmp_path, name):
    load_or_build(tmp_path, "key", build)
    path = tmp_path / "key" / name
    data = path.read_bytes()
    for at in range(0, len(data), 41):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        assert load_or_build(tmp_path, "key", build).is_new, f"byte {at}"


TOKENS = "input_ids.tokens"


def build_long(writer):
    for n in range(40):
        add(writer, [{"input_ids": range(n, n + 5_000), "labels": range(5_000)}], [0])
    return {}


@pytest.mark.parametrize("at", [0, 65_535, 65_536, 500_001, 799_999])
def test_a_flipped_token_is_noticed_before_the_first_is_read_and_the_dataset_encoded_again(
    tmp_path, monkeypatch, caplog, at
):
    monkeypatch.setattr(cache, "CHUNK", 1 << 16)
    intact = contents(load_or_build(tmp_path, "key", build_long))
    flip(tmp_path / "key" / TOKENS, at)
    assert find(tmp_path, "key") is None
    cached = load_or_build(tmp_path, "key", build_long)
    assert cached.is_new
    assert contents(cached) == intact
    assert caplog.messages == [
        f"{tmp_path / 'key'} is damaged ({TOKENS} does not match its checksum): encoding it again"
    ]


@pytest.mark.parametrize("size", [0, 70_000])
def test_a_file_cut_short_while_it_is_in_use_is_an_error_that_the_next_start_mends(tmp_path, size):
    store = load_or_build(tmp_path, "key", build_long).store
    with (tmp_path / "key" / TOKENS).open("r+b") as file:
        file.truncate(size)
    with pytest.raises(DataError, match=rf"{TOKENS}: .*too early; start the same command again"):
        store[20]
    assert list(load_or_build(tmp_path, "key", build_long).store[20]["labels"]) == [*range(5_000)]


def test_a_folder_with_hashes_of_blocks_is_still_found(tmp_path):
    """Until 27 November 2026, each file of tokens had one of hashes beside it."""
    before = load_or_build(tmp_path, "key", build).store
    folder = tmp_path / "key"
    header = json.loads((folder / "header.json").read_text())
    del header["check"]
    for name in header["features"]:
        (folder / f"{name}.sums").write_bytes(b"12345678")
        header["files"][f"{name}.sums"] = [8, files.digest(b"12345678")]
    header["check"] = files.digest(cache._canonical(header))
    (folder / "header.json").write_bytes(cache._canonical(header))
    found = load_or_build(tmp_path, "key", never)
    assert contents(found) == EXPECTED
    assert found.store.content == before.content


def test_a_folder_of_another_version_is_made_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "VERSION", 0)
    load_or_build(tmp_path, "key", build)
    monkeypatch.undo()
    assert load_or_build(tmp_path, "key", build).is_new


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["pwrite", "fsync", "mkdir", "rename", "posix_fallocate"])
def test_a_disk_that_fails_at_any_call_leaves_no_cache_and_says_why(
    tmp_path, monkeypatch, call, error
):
    load_or_build(tmp_path, "other", build)
    monkeypatch.setattr(files, "os", Failing(call, error))
    with pytest.raises(DataError, match=r"data.cache_dir: .*(disk is full|input/output error)"):
        load_or_build(tmp_path, "key", build)
    monkeypatch.undo()
    assert names(tmp_path) == ["other"]
    assert load_or_build(tmp_path, "key", build).is_new


class Failing:
    """The module ``os`` with one call that always fails."""

    def __init__(self, call, error):
        self.call, self.error = call, error

    def __getattr__(self, name):
        def fail(*arguments, **more):
            raise OSError(self.error, os.strerror(self.error))

        return fail if name == self.call else getattr(os, name)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"data.cache_dir: .*not a folder"):
        load_or_build(tmp_path / "file" / "cache", "key", build)


SCRIPT = """
import sys, time
from pathlib import Path
import numpy as np
from surefoot.data.store.cache import flattened, load_or_build
def build(writer):
    with open(sys.argv[1] + ".builds", "a") as file: file.write("x")
    writer.append(flattened([{"input_ids": [1, 2]}]), np.array([0]))
    print("writing", flush=True)
    time.sleep(float(sys.argv[2]))
    return {}
cached = load_or_build(Path(sys.argv[1]), "key", build)
print("has", cached.store.content, flush=True)
"""


def start(root, seconds):
    command = [sys.executable, "-c", SCRIPT, str(root), str(seconds)]
    return warm.Popen(command, stdout=subprocess.PIPE, text=True)


def test_of_two_processes_one_builds_and_both_have_it(tmp_path):
    root = tmp_path / "cache"
    processes = [start(root, 1), start(root, 1)]
    said = [process.communicate()[0].splitlines()[-1] for process in processes]
    assert said[0] == said[1]
    assert said[0].startswith("has ")
    assert (tmp_path / "cache.builds").read_text() == "x"
    assert names(root) == ["key"]


def test_a_killed_build_holds_nobody_up_and_is_swept_away(tmp_path):
    root = tmp_path / "cache"
    with start(root, 600) as process:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
    assert any(name.endswith(".part") for name in names(root))
    assert load_or_build(root, "key", build).is_new
    assert names(root) == ["key"]


def test_without_locks_both_build_and_the_first_one_stays(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    both = threading.Barrier(2)
    found = []

    def slow(writer):
        both.wait()
        return build(writer)

    threads = [
        threading.Thread(target=lambda: found.append(load_or_build(tmp_path, "key", slow)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [contents(cached) for cached in found] == [EXPECTED, EXPECTED]
    assert names(tmp_path) == ["key"]
    assert contents(load_or_build(tmp_path, "key", never)) == EXPECTED


def test_the_header_is_json_for_people(tmp_path):
    load_or_build(tmp_path, "key", build)
    header = json.loads((tmp_path / "key" / "header.json").read_text())
    assert header["features"] == ["input_ids", "labels", "weight"]
    assert header["files"]["input_ids.tokens"][0] == 6 * 4


def test_the_default_folder_is_in_the_users_cache(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(default_folder()) == "/somewhere/surefoot/data"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", "/home/me")
    assert str(default_folder()) == "/home/me/.cache/surefoot/data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert str(default_folder()) == "/home/me/.cache/surefoot/data"
