import json
import signal
import time

import pytest

from project import Project, metrics, start, surefoot
from surefoot.plugins.board.run_state import state_of
from surefoot.training.callbacks.launches import HEARTBEAT, NAME, LaunchFiles


def events(run):
    return [json.loads(line) for line in (run / NAME).read_text().splitlines()]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    found = Project(tmp_path_factory.mktemp("launches"), train={"max_steps": 4})
    assert surefoot("train", found.recipe)[0] == 0
    return found


def test_a_launch_records_its_begin_its_logs_and_its_end(project):
    first, surroundings, *logs, end = events(project.run)
    assert (first["event"], first["ranks"], first["resumed_from"]) == ("launch", 1, None)
    assert first["memory"] > 1e8, "the machine is recorded"
    assert (surroundings["event"], surroundings["ranks"]) == ("surroundings", 1)
    assert [log["step"] for log in logs] == [row["step"] for row in metrics(project.run)]
    assert logs[-1]["peak_memory"] > 1e6
    waited = [log["save_blocking_seconds"] for log in logs]
    assert waited == sorted(waited)
    assert waited[-1] > 0
    assert (end["event"], end["outcome"], end["step"]) == ("end", "complete", 4)
    beat = json.loads((project.run / HEARTBEAT).read_text())
    assert (beat["step"], beat["max_steps"], beat["pid"]) == (4, 4, first["pid"])
    assert state_of(project.run).name == "complete"


def test_a_stop_and_a_kill_are_told_apart(project, tmp_path):
    def launch(*overrides, signals=()):
        run = tmp_path / "run"
        process = start("train", project.recipe, f"train.output_dir={run}", *overrides)
        for number in signals:
            wait_for_a_step(run, process)
            process.send_signal(number)
        process.communicate(timeout=120)
        return state_of(run)

    assert launch("train.max_steps=100000", signals=[signal.SIGTERM]).end["signal"] == "SIGTERM"
    (tmp_path / "run" / HEARTBEAT).unlink()
    died = launch("train.max_steps=100000", signals=[signal.SIGKILL])
    assert (died.name, died.evidence) == ("died", "no_end")
    assert died.launch["resumed_from"].startswith("checkpoint-")


def wait_for_a_step(run, process):
    end = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < end:
        try:
            if json.loads((run / HEARTBEAT).read_text())["step"] > 1:
                return
        except (OSError, ValueError):
            pass
        time.sleep(0.05)
    raise AssertionError(process.communicate())


def test_an_error_of_the_run_is_its_end(project, tmp_path):
    run = tmp_path / "run"
    code, _, said = surefoot(
        "train", project.recipe, f"train.output_dir={run}", "optim.adamw.learning_rate=1e30"
    )
    assert code == 2, said
    state = state_of(run)
    assert (state.name, state.end["kind"]) == ("failed", "RunError")
    assert state.end["error"] in said.replace("\n  ", "\n") or "step" in state.end["error"]


def test_a_full_disk_does_not_stop_a_run_for_its_heartbeat(tmp_path):
    files = LaunchFiles(tmp_path / "no such folder")
    files.begin()
    files.beat(1, 2, is_due=True)
    files.log(step=1)
    files.end("complete")


@pytest.mark.parametrize("between", [[], ["start"]])
def test_the_last_heartbeat_of_a_launch_that_was_killed_is_recorded_by_the_next(between, tmp_path):
    first = LaunchFiles(tmp_path)
    first.begin()
    first.beat(7, 9, is_due=True)
    for _ in between:
        first.announce(1)
    second = LaunchFiles(tmp_path)
    second.begin()
    second.end("stopped")
    LaunchFiles(tmp_path).begin()
    beat = next(row for row in events(tmp_path) if row["event"] == "heartbeat")
    assert (beat["began"], beat["step"]) == (first.began, 7)
    names = ["launch", *between, "heartbeat", "launch", "end", "launch"]
    assert [row["event"] for row in events(tmp_path)] == names


@pytest.mark.parametrize("content", [b"[]\n", b"\xff\n", b"{", b""])
def test_a_record_that_is_damaged_stops_no_launch(content, tmp_path):
    (tmp_path / NAME).write_bytes(content)
    LaunchFiles(tmp_path).begin()
    assert (tmp_path / NAME).read_bytes().startswith(content)
