"""The board over runs in an object store."""

import fcntl
import json
import time

import pytest
from starlette.testclient import TestClient

from board.runs import COMPLETE, RECIPE, write_run
from checkpoint.sample import sample_states
from surefoot.board.app import create_app
from surefoot.board.board import open_board
from surefoot.board.reports import runs as reports
from surefoot.checkpoint.saving.preparation import save
from surefoot.errors import RunError
from surefoot.remote.store import Store
from surefoot.remote.uploading import upload
from surefoot.storage.address import Address, default_cache

MINE = {"X-Surefoot": "1"}


@pytest.fixture
def root(bucket, tmp_path, monkeypatch):
    """``s3://…/runs`` with a run that is complete, and one whose record has no end."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, end in (("one", COMPLETE), ("deep/er/two", None)):
        folder = write_run(tmp_path / name, end=end)
        for file in ("recipe.yaml", "metrics.jsonl", "launches.jsonl"):
            bucket.put(f"../{name}/{file}", (folder / file).read_bytes())
    upload(Store(Address(f"s3://{bucket.name}/runs/one")), save(tmp_path, 4, sample_states(4)))
    return f"s3://{bucket.name}/runs"


@pytest.fixture
def bucket(bucket):
    """Keys below ``runs/``, not only those of one run."""
    put = bucket.put
    bucket.put = lambda key, data: put(key, data) if key[:3] != "../" else _put(bucket, key, data)
    return bucket


def _put(bucket, key, data):
    from .stores import request

    request(bucket.port, "PUT", f"/{bucket.name}/runs/{key[3:]}", data)


def opened(url):
    board = open_board(Address(url))
    board.store.refresh()
    return board


def rows(board):
    return {row["run"]: row for row in reports.table(board)["runs"]}


def test_runs_of_a_store_are_found_and_their_states_are_not_guessed(root, bucket):
    board = opened(root)
    assert board.store.problem is None
    found = rows(board)
    assert found.keys() == {"one", "deep/er/two"}
    assert (found["one"]["state"], found["one"]["evidence"]) == ("complete", "end")
    assert (found["deep/er/two"]["state"], found["deep/er/two"]["evidence"]) == ("unknown", "store")
    assert found["one"]["loss"] == pytest.approx(2 / 20**0.5)
    (line,) = reports.checkpoints(board, "one")["checkpoints"]
    assert (line["step"], line["problem"]) == (4, None)
    assert found["one"]["size"] > line["num_bytes"], "weights count, and are not copied"
    assert not list(board.root.rglob("*.safetensors"))
    here = default_cache() / Address(f"{root}/deep/er/two").slug
    here.mkdir(parents=True)
    with (here / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert rows(board)["deep/er/two"]["state"] == "running", "a process here trains it"


def test_only_what_changed_is_read_again_and_what_is_deleted_disappears(root, bucket, monkeypatch):
    board, read = opened(root), []
    board = opened(root)
    original = Store.read
    monkeypatch.setattr(
        Store, "read", lambda self, name: (read.append(name), original(self, name))[1]
    )
    board.store.refresh()
    assert read == []
    more = b'{"step": 30, "loss": 0.125}\n'
    bucket.put("../one/metrics.jsonl", (board.root / "one/metrics.jsonl").read_bytes() + more)
    board.store.refresh()
    assert read == ["one/metrics.jsonl"]
    assert rows(board)["one"]["loss"] == 0.125
    Store(Address(root)).delete("deep/er/two/launches.jsonl")
    Store(Address(root)).delete("deep/er/two/metrics.jsonl")
    board.store.refresh()
    assert rows(board).keys() == {"one"}
    assert not (board.root / "deep").exists()


def test_tags_are_kept_in_the_store_and_nothing_else_is_changed_there(root, bucket):
    board = opened(root)
    assert reports.set_tags(board, "one", ["best", "paper"])["tags"] == ["best", "paper"]
    assert json.loads(Store(Address(root)).read("one/tags.json")) == ["best", "paper"]
    assert rows(opened(root))["one"]["tags"] == ["best", "paper"]
    with pytest.raises(RunError, match="are in s3://"):
        reports.set_pin(board, "one", 4, is_pinned=True)


def test_names_that_would_leave_the_copy_are_not_copied(root, bucket, tmp_path):
    for name in (
        "runs//x/metrics.jsonl",
        "runs/.hidden/metrics.jsonl",
        "runs/a/../../metrics.jsonl",
    ):
        Store(Address(f"s3://{bucket.name}")).write(name, b'{"step": 1, "loss": 1}\n')
    board = opened(root)
    assert rows(board).keys() == {"one", "deep/er/two"}
    assert not list((tmp_path / "cache").glob("**/.hidden"))
    assert {path.name for path in board.root.parent.iterdir()} == {"runs", "runs.json"}


def test_the_board_shows_a_store_and_says_when_it_cannot_be_read(root, monkeypatch):
    with TestClient(create_app(Address(root)), base_url="http://127.0.0.1:7860") as client:
        end = time.monotonic() + 30
        while len((found := client.get("/api/runs").json())["runs"]) < 2:
            assert time.monotonic() < end
            time.sleep(0.1)
        assert (found["root"], found["is_store"]) == (root, True)
        assert client.get("/api/series", params={"run": "one", "names": "loss"}).json()["series"]
        for path in ("/api/resume?run=one", "/api/start"):
            body = {"text": RECIPE, "file": "mine.yaml"}
            assert client.post(path, headers=MINE, json=body).status_code == 409
        body = {"run": "one", "checkpoint": "checkpoint-4", "command": "verify"}
        job = client.post("/api/checkpoints", headers=MINE, json=body).json()
        assert job["command"] == f"surefoot ckpt verify {root}/one/checkpoint-4 --json"
        client.post("/api/cancel", params={"number": job["job"]}, headers=MINE)
    board = open_board(Address(f"{root[:-5]}x/runs"))
    board.store.refresh()
    assert "cannot list" in board.store.problem
    assert board.facts()["problem"] == board.store.problem
