"""Folders of runs that a stranger has made: nothing outside of them is shown, nothing hangs, and
one run does not take the table of all with it."""

import json
import os
from pathlib import Path

import pytest
from starlette.testclient import TestClient

import commands
from each import some
from surefoot.plugins.board.app import create_app

from .runs import COMPLETE, write_run

MINE = {"X-Surefoot": "1"}
SECRET = "root:x:0:0:the-secret"
FILES = [
    "launches.jsonl",
    "metrics.jsonl",
    ".heartbeat.json",
    "recipe.yaml",
    "all_results.json",
    ".lock",
    "pinned.json",
    "train.log",
    "rollouts-1.jsonl",
    "generations-x.jsonl",
]


def board_of(root):
    app = create_app(root, is_read_only=True)
    return TestClient(app, base_url="http://127.0.0.1:7860", headers=MINE)


def looks(name):
    """Every address of a board that shows something of a run's files."""
    return [
        "/api/runs",
        "/api/materials",
        f"/api/run?run={name}",
        f"/api/series?run={name}&names=loss,peak_memory",
        f"/api/log?run={name}",
        f"/api/samples?run={name}&file=rollouts-1.jsonl",
        f"/api/samples?run={name}&file=generations-x.jsonl",
        f"/api/diff?a={name}&b=good",
        f"/api/checkpoints?run={name}",
        f"/api/recipe?file={name}/recipe.yaml",
    ]


def put(folder, name, kind, target):
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(target)


@pytest.mark.parametrize("kind", ["link", "pipe", "endless"])
def test_what_is_no_regular_file_of_the_run_is_not_read(tmp_path, kind):
    root, secret = tmp_path / "root", tmp_path / "secret"
    line = {"step": 1, "loss": 1.5, "event": "log", "answer": SECRET, "peak_memory": 77.5}
    secret.write_text(f"{SECRET}: {json.dumps(line)}\n{json.dumps(line)}\n")
    write_run(root / "good", end=COMPLETE)
    for name in FILES:
        folder = write_run(root / f"bad-{name}", end=COMPLETE)
        put(folder, name, kind, "/dev/zero" if kind == "endless" else secret)
    with board_of(root) as board:
        rows = {row["run"]: row for row in board.get("/api/runs").json()["runs"]}
        assert rows["good"]["state"] == "complete"
        for name in FILES:
            for path in looks(f"bad-{name}"):
                answer = board.get(path)
                assert answer.status_code < 500, path
                assert SECRET not in answer.text, path
                assert "77.5" not in answer.text, path


def test_the_recipe_of_a_run_that_is_a_link_is_named_as_one(tmp_path):
    folder = write_run(tmp_path / "root/run", end=COMPLETE)
    put(folder, "recipe.yaml", "link", "/etc/hostname")
    assert "is a symbolic link" in commands.refused("plan", folder).replace("\n", " ")
    (row,) = json.loads(commands.ok("runs", folder, "--json"))["runs"]
    assert "is a symbolic link" in row["recipe_problem"]


def test_a_recipe_that_is_a_pipe_or_endless_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "endless.yaml").symlink_to("/dev/zero")
    for name in ("pipe", "endless"):
        assert "not a regular file" in commands.refused("plan", tmp_path / f"{name}.yaml")


def test_a_recipe_that_a_user_names_may_be_a_link(tmp_path):
    """As a ConfigMap of Kubernetes is mounted."""
    from surefoot.recipe.files import read_text

    from .runs import RECIPE

    (tmp_path / "..data").mkdir()
    (tmp_path / "..data/recipe.yaml").write_text(RECIPE)
    (tmp_path / "recipe.yaml").symlink_to("..data/recipe.yaml")
    assert read_text(tmp_path / "recipe.yaml") == RECIPE


VALUES = {
    "half": r'{"event": "launch", "host": "\ud800", "\udfff": 1}',
    "deep": '{"event": "launch", "host": ' + "[" * 900 + "]" * 900 + "}",
    "deeper": '{"event": "launch", "host": ' + "[" * 90_000 + "]" * 90_000 + "}",
    "digits": '{"event": "launch", "pid": ' + "9" * 4000 + "}",
    "nan": '{"event": "launch", "time": NaN, "pid": -Infinity}',
    "bytes": b'{"event": "launch", "host": "\xed\xa0\x80\xff"}',
}


@pytest.mark.parametrize("value", VALUES)
def test_a_value_that_no_json_can_have_spoils_neither_its_run_nor_the_others(tmp_path, value):
    line = VALUES[value] if isinstance(VALUES[value], bytes) else VALUES[value].encode()
    write_run(tmp_path / "good", end=COMPLETE)
    folder = write_run(tmp_path / "bad")
    (folder / "launches.jsonl").write_bytes(line + b"\n")
    (folder / "rollouts-1.jsonl").write_bytes(line + b"\n")
    (folder / "metrics.jsonl").write_bytes(line.replace(b'"event"', b'"step": 1, "event"') + b"\n")
    (folder / "pinned.json").write_bytes(line)
    (folder / ".heartbeat.json").write_bytes(line)
    with board_of(tmp_path) as board:
        for path in looks("bad"):
            answer = board.get(path)
            assert answer.status_code < 500, path
            json.loads(answer.text, parse_constant=lambda name: pytest.fail(name))
        assert {row["run"] for row in board.get("/api/runs").json()["runs"]} >= {"good", "bad"}
    for path in (tmp_path, folder):
        assert json.loads(commands.ok("runs", path, "--json"))


def test_a_folder_whose_name_is_no_unicode_is_a_row_like_the_others(tmp_path):
    write_run(tmp_path / "good", end=COMPLETE)
    write_run(Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff")), end=COMPLETE)
    with board_of(tmp_path) as board:
        names = {row["run"] for row in board.get("/api/runs").json()["runs"]}
        assert {"good", "bad\ufffd"} <= names
        assert board.get("/api/materials").status_code == 200


TEXTS = {
    "half of a character": 'model: {path: "\\ud800"}',
    "null": 'model: {path: "a\\0b"}',
    "hexadecimal": "model: {path: 0x" + "f" * 20_000 + "}",
    "digits": "model: {path: " + "9" * 5000 + "}",
    "a key of digits": "9" * 5000 + ": 1",
    "keys": "\n".join(f"k{number}: 1" for number in range(3000)),
    "infinite": "optim: {adamw: {learning_rate: .inf}}",
}


@pytest.mark.parametrize("text", some(TEXTS, [name for name in TEXTS if name != "keys"]))
def test_a_recipes_odd_values_are_problems_of_it(tmp_path, text):
    app = create_app(tmp_path, is_read_only=True, folders=[tmp_path])  # where paths are judged
    with TestClient(app, base_url="http://127.0.0.1:7860", headers=MINE) as board:
        found = board.post("/api/check", json={"text": TEXTS[text]})
        assert found.status_code == 200
        assert found.json()["problems"]
        edit = {"text": TEXTS[text], "keys": ["model", "9" * 5000], "value": 1}
        assert board.post("/api/edit", json=edit).status_code in (200, 409)
