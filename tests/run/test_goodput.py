"""The ledger of a run's time: its parts sum to its length, whatever ended its launches."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

import commands
from project import Project, start, surefoot
from surefoot.checkpoint.disk.commit import committed, step_of
from surefoot.run.goodput import PARTS, ledger_of
from surefoot.training.callbacks.launches import HEARTBEAT, NAME

goodput, shown, refused = commands.of("runs", "goodput")


def launch(began, resumed_from=None, **more):
    return {
        "event": "launch",
        "time": began + 1,
        "began": began,
        "resumed_from": resumed_from,
    } | more


def at(event, began, step, starting=10.0, training=0.0, **more):
    """An event at the moment that its seconds sum to."""
    extra = {name: more.pop(name) for name in PARTS if name in more}
    seconds = {"starting": starting, "training": training, **extra}
    row = {"event": event, "time": began + sum(seconds.values()), "began": began}
    return {**row, "step": step, "seconds": seconds, **more}


def written(folder, *rows, beat=None):
    (folder / NAME).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if beat:
        (folder / HEARTBEAT).write_text(json.dumps(beat))
    ledger = ledger_of(folder)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall, abs=1e-6)
    return {name: round(value, 6) for name, value in ledger.seconds.items() if value}, ledger


def test_one_launch_is_divided_as_it_was_measured(tmp_path):
    end = at("end", 0, 20, training=60.0, data=5.0, saving=3.0, evaluating=2.0, ending=1.0)
    log = at("log", 0, 10, training=30.0)
    parts, ledger = written(tmp_path, launch(0), log, end)
    expected = {"trained": 60, "data": 5, "saving": 3, "evaluating": 2, "starting": 10, "ending": 1}
    assert parts == expected
    assert (ledger.wall, ledger.step, ledger.num_repeated_steps) == (81, 20, 0)
    assert ledger.goodput == pytest.approx(60 / 81)


def test_what_a_kill_has_cost_is_repeated_and_down(tmp_path):
    """Killed in step 26, 6 steps after its save; until the last heartbeat it has trained 52 s."""
    parts, ledger = written(
        tmp_path,
        launch(0),
        at("log", 0, 10, training=20.0),
        at("log", 0, 20, training=40.0),
        at("heartbeat", 0, 25, training=52.0),
        launch(100, "checkpoint-20"),
        at("end", 100, 40, training=40.0, outcome="complete"),
    )
    assert parts == {"trained": 80, "repeated": 12, "starting": 20, "down": 38}
    assert (ledger.wall, ledger.num_launches, ledger.num_repeated_steps) == (150, 2, 5)


def test_the_end_that_a_watchdog_has_recorded_says_no_seconds(tmp_path):
    """It has read none of the run's memory: from the last log to its end, nothing is known."""
    parts, ledger = written(
        tmp_path,
        launch(0),
        at("log", 0, 10, training=20.0),
        {"event": "end", "time": 150, "outcome": "failed", "kind": "Hang"},
        launch(160, "checkpoint-10"),
        at("end", 160, 20, training=20.0, outcome="complete"),
    )
    assert parts == {"trained": 40, "starting": 20, "down": 10, "unrecorded": 120}
    assert (ledger.wall, ledger.step) == (190, 20)


def test_steps_between_two_logs_are_divided(tmp_path):
    parts, ledger = written(
        tmp_path,
        launch(0),
        at("log", 0, 10, training=20.0),
        launch(50, "checkpoint-5"),
        at("end", 50, 5, training=0.0, outcome="stopped"),
    )
    assert (parts["trained"], parts["repeated"], ledger.num_repeated_steps) == (10, 10, 5)


def test_a_checkpoint_before_the_launch_voids_launches_before_it(tmp_path):
    """As where the latest checkpoints are damaged."""
    parts, ledger = written(
        tmp_path,
        launch(0),
        at("end", 0, 10, training=10.0, outcome="stopped"),
        launch(20, "checkpoint-10"),
        at("end", 20, 20, training=20.0, outcome="stopped"),
        launch(50, "checkpoint-5"),
        at("end", 50, 20, training=15.0, outcome="complete"),
    )
    assert (parts["trained"], parts["repeated"], ledger.num_repeated_steps) == (20, 25, 15)


def test_a_rollback_repeats_steps_within_a_launch(tmp_path):
    parts, ledger = written(
        tmp_path,
        launch(0),
        at("log", 0, 10, training=10.0),
        at("log", 0, 8, training=14.0),
        at("end", 0, 12, training=18.0),
    )
    assert (parts["trained"], parts["repeated"], ledger.num_repeated_steps) == (12, 6, 2)


def test_a_launch_that_waited_for_the_one_before_counts_no_second_twice(tmp_path):
    parts, ledger = written(
        tmp_path,
        launch(0),
        at("end", 0, 10, training=30.0, outcome="stopped"),
        launch(35, "checkpoint-10"),
        at("end", 35, 20, training=10.0, starting=15.0),
    )
    assert parts == {"trained": 40, "starting": 20}
    assert ledger.wall == 60


def test_a_run_that_trains_is_told_up_to_its_heartbeat(tmp_path):
    beat = at("heartbeat", 0, 15, training=30.0)
    parts, ledger = written(tmp_path, launch(0), at("log", 0, 10, training=20.0), beat=beat)
    assert parts == {"trained": 30, "starting": 10}
    assert (ledger.step, ledger.wall) == (15, 40)


def test_a_heartbeat_from_before_the_last_log_is_no_rollback(tmp_path):
    beat = at("heartbeat", 0, 9, training=19.5)
    parts, ledger = written(tmp_path, launch(0), at("log", 0, 10, training=20.0), beat=beat)
    assert parts == {"trained": 20, "starting": 10}
    assert (ledger.step, ledger.num_repeated_steps, ledger.wall) == (10, 0, 30)


def test_launches_of_earlier_versions_are_not_recorded(tmp_path):
    old = {"event": "launch", "time": 0.0, "resumed_from": None}
    parts, _ = written(tmp_path, old, {"event": "end", "time": 60.0, "step": 5})
    assert parts == {"unrecorded": 60}


def test_what_is_no_record_is_refused(tmp_path):
    assert "there is no record of launches in it" in refused(tmp_path)
    (tmp_path / NAME).write_text('{"event": "launch", "time": "now"}\n')
    assert "is no record of launches" in refused(tmp_path)
    assert "no such folder" in refused(tmp_path / "none")


def killed(project, num_kills, seconds, rng):
    """Launch ``project``, kill the first launches, and let the last train 20 steps: the seconds
    that passed from the first start to the last end, and the step."""
    surefoot("version")  # the process from which all are forked is there
    began = ended = time.time()
    end = 10**6
    for number in range(num_kills + 1):
        if number == num_kills:
            beat = json.loads((project.run / HEARTBEAT).read_text())["step"]
            end = max(beat, *map(step_of, committed(project.run)), 0) + 20
        process = start("train", project.recipe, f"train.max_steps={end}")
        if number < num_kills:
            deadline = time.monotonic() + 120
            path = project.run / HEARTBEAT
            while process.poll() is None and time.monotonic() < deadline:
                beat = json.loads(path.read_text()) if path.exists() else {}
                if beat.get("pid") == process.pid and "training" in beat["seconds"]:
                    break
                time.sleep(0.02)
            time.sleep(rng.uniform(0, seconds))
            os.kill(process.pid, signal.SIGKILL)
        _, err = process.communicate(timeout=300)
        ended = time.time()
        assert process.returncode == (-signal.SIGKILL if number < num_kills else 0), err
    return ended - began, end


def check(project, num_kills, wall):
    ledger = ledger_of(project.run)
    parts = ledger.seconds
    rows = [json.loads(line) for line in (Path(project.run) / NAME).read_text().splitlines()]
    assert sum(parts.values()) == pytest.approx(ledger.wall, rel=1e-3)
    assert abs(ledger.wall - wall) < 1.0 + 1e-3 * wall  # the interpreter's end
    assert parts["unrecorded"] < 1e-3 * ledger.wall
    assert all(seconds >= -1e-3 for seconds in parts.values()), parts
    assert ledger.num_launches == num_kills + 1 == sum(row["event"] == "launch" for row in rows)
    return ledger


def evaluated(folder, **train):
    return Project(
        folder,
        data={"val_size": 4},
        # so that the 20 steps of the last launch evaluate and save, wherever a kill was
        train={"eval_steps": 20, **train},
        checkpoint={"save_steps": 20},
    )


def test_a_run_that_was_killed_has_every_second_in_its_ledger(tmp_path):
    project = evaluated(tmp_path)
    wall, end = killed(project, 2, 0.3, random.Random(0))
    ledger = check(project, 2, wall)
    assert ledger.step == end
    assert min(ledger.seconds[name] for name in ("trained", "evaluating", "saving", "down")) > 0
    text = shown(project.run)
    assert text.startswith("3 launches in 0:")
    assert "trained" in text
    figures = json.loads(shown(project.run, "--json"))
    assert figures["seconds"] == ledger.seconds
    assert figures["goodput"] == ledger.seconds["trained"] / ledger.wall


@pytest.mark.proof
def test_a_run_that_nothing_happened_to_repeats_nothing(tmp_path):
    project = evaluated(tmp_path, max_steps=20)
    assert surefoot("train", project.recipe)[0] == 0
    assert surefoot("train", project.recipe, "train.max_steps=30")[0] == 0
    ledger = ledger_of(project.run)
    assert (ledger.seconds["repeated"], ledger.num_repeated_steps, ledger.step) == (0, 0, 30)


@pytest.mark.proof
def test_a_hundred_kills_leave_no_second_out(tmp_path):
    num_kills = int(os.environ.get("SUREFOOT_KILLS", "100"))
    project = evaluated(tmp_path)
    wall, end = killed(project, num_kills, 1.0, random.Random(0))
    ledger = check(project, num_kills, wall)
    assert ledger.step == end
    assert ledger.seconds["repeated"] > 0
    print(ledger)
