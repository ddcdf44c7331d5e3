import fcntl
import json
import os
import socket

import pytest

from surefoot.plugins.board.run_state import Summaries, is_locked, state_of
from surefoot.training.callbacks.launches import HEARTBEAT, LaunchFiles, is_alive, process

from .runs import COMPLETE, write_run


def state(folder):
    found = state_of(folder)
    return found.name, found.evidence


def test_a_run_is_running_while_a_process_holds_its_lock_and_a_look_takes_it_from_nobody(tmp_path):
    folder = write_run(tmp_path / "run")
    assert is_locked(folder) is False
    with (folder / ".lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert is_locked(folder) is True
        assert state(folder) == ("running", "lock")
    assert state(folder) == ("died", "no_end")
    assert is_locked(tmp_path / "no run") is False


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda folder: LaunchFiles(folder).begin(), ("died", "no_end")),  # a later launch
        (lambda folder: (folder / "launches.jsonl").unlink(), ("ended", "no_record")),
    ],
)
def test_what_comes_after_a_recorded_end_is_its_state(tmp_path, change, expected):
    folder = write_run(tmp_path / "run", end=COMPLETE)
    assert state(folder) == ("complete", "end")
    change(folder)
    assert state(folder) == expected


@pytest.mark.parametrize("outcome", ["stopped", "failed"])
def test_the_end_that_a_launch_has_recorded_is_its_state(tmp_path, outcome):
    assert state(write_run(tmp_path / "run", end={"outcome": outcome})) == (outcome, "end")


def test_a_fresh_heartbeat_of_a_dead_process_is_no_sign_of_life(tmp_path):
    folder = write_run(tmp_path / "run")
    LaunchFiles(folder).beat(3, 10, is_due=True)  # of this process, which lives and has no lock
    assert state(folder) == ("died", "no_end")


def test_without_locks_the_process_tells_and_one_of_another_machine_is_unknown(
    tmp_path, monkeypatch
):
    folder = write_run(tmp_path / "run")

    def no_locks(*_):
        raise OSError(37, os.strerror(37))  # ENOLCK

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert is_locked(folder) is None
    assert state(folder) == ("unknown", "no_locks")
    (folder / HEARTBEAT).write_text(json.dumps(process()))
    assert state(folder) == ("running", "process")
    (folder / HEARTBEAT).write_text(json.dumps({**process(), "pid_started": "boot/1"}))
    assert state(folder) == ("died", "no_process"), "another process has its number now"


def test_a_process_that_was_started_and_does_not_train_yet_is_no_secret(tmp_path):
    LaunchFiles(tmp_path).announce(os.getpid())
    assert state(tmp_path) == ("running", "starting")
    LaunchFiles(tmp_path).announce(2**22 + 1)
    assert state(tmp_path) == ("failed", "not_begun")
    LaunchFiles(tmp_path).begin()
    LaunchFiles(tmp_path).end("complete")
    LaunchFiles(tmp_path).announce(2**22 + 1)  # a refused start does not undo what is complete
    assert state(tmp_path) == ("complete", "end")


def test_half_written_and_foreign_lines_are_no_evidence(tmp_path):
    folder = write_run(tmp_path / "run", end=COMPLETE)
    with (folder / "launches.jsonl").open("a") as file:
        file.write('[1]\nnull\n{"event": "end"')
    (folder / HEARTBEAT).write_text('{"time": ')
    assert state(folder) == ("complete", "end")


def test_a_process_is_known_by_machine_and_start():
    mine = process()
    assert mine["host"] == socket.gethostname()
    assert is_alive(mine)
    assert is_alive({**mine, "pid_started": "x"}) is False
    assert is_alive({**mine, "host": "elsewhere"}) is None


def test_what_did_not_begin_says_why_and_a_recipe_that_is_not_there_is_no_problem(tmp_path):
    def row(name):
        found = Summaries(tmp_path).of(tmp_path / name)
        return found["has_begun"], found["reason"], found["recipe_problem"]

    (tmp_path / "ended").mkdir()
    LaunchFiles(tmp_path / "ended").begin()
    LaunchFiles(tmp_path / "ended").end("failed", error="no rows\nat all")
    assert row("ended") == (False, "no rows", None)
    (tmp_path / "never").mkdir()
    LaunchFiles(tmp_path / "never").announce(2**22 + 1)
    assert row("never") == (False, None, None)
    (tmp_path / "never/train.log").write_text("$ surefoot train\nerror: no such model\n\n")
    assert row("never") == (False, "no such model", None)
    LaunchFiles(tmp_path / "never").announce(os.getpid())
    assert row("never") == (False, None, None), "it is starting"
    write_run(tmp_path / "run", end={"outcome": "failed", "error": "the loss is nan"})
    assert Summaries(tmp_path).of(tmp_path / "run")["has_begun"]
