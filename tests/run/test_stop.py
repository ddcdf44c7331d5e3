"""A stop without a signal: requested by a callback, from any thread, or by `surefoot stop`."""

import fcntl
import json
import os
import signal
import socket
import threading
import time
import traceback

import pytest

import commands
import small
import surefoot
from project import Project, checkpoints, losses, start
from surefoot.errors import RunError
from surefoot.recipe.recipe import load
from surefoot.run._launch import LaunchRecord
from surefoot.run.training_run import run
from surefoot.training.callback import TrainerCallback
from surefoot.training.callbacks import launches
from surefoot.training.callbacks.launches import HEARTBEAT, NAME, STOP, request_stop

stop, stopped, refused = commands.of("stop")


def events(run):
    return [json.loads(line) for line in (run / NAME).read_text().splitlines()]


def wait_for_a_step(run, process):
    end = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < end:
        beat = run / HEARTBEAT
        if beat.exists() and json.loads(beat.read_text())["step"] > 1:
            return
        time.sleep(0.05)
    raise AssertionError(process.communicate())


class At(TrainerCallback):
    """Does something at the end of a step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step_end(self, args, state, control):
        if state.global_step == self.step:
            self.act(args, control)


def request(number):
    def act(args, control):
        control.stop_signal = number

    return act


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return Project(tmp_path_factory.mktemp("stop"), train={"max_steps": 8})


@pytest.mark.proof
def test_a_callback_stops_a_run_in_a_thread_as_a_signal_would(project, tmp_path):
    run, outcomes = tmp_path / "run", []

    def work():
        callbacks = [At(4, request(signal.SIGTERM))]
        outcomes.append(
            surefoot.train(project.recipe, callbacks=callbacks, train={"output_dir": str(run)})
        )

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (outcomes[0].signal, outcomes[0].global_step) == (signal.SIGTERM, 4)
    assert checkpoints(run)[-1].name == "checkpoint-4"
    end = events(run)[-1]
    assert (end["outcome"], end["signal"], end["step"]) == ("stopped", "SIGTERM", 4)
    assert not (run / "all_results.json").exists()
    assert surefoot.train(project.recipe, train={"output_dir": str(run)}).global_step == 8
    surefoot.train(project.recipe)
    assert losses(run) == losses(project.run)


def test_a_file_in_the_folder_of_a_run_stops_it(project, tmp_path, monkeypatch):
    monkeypatch.setattr(launches, "INTERVAL", 0.0)
    callbacks = [At(5, lambda args, _: request_stop(args.output_dir))]
    outcome = surefoot.train(
        project.recipe, callbacks=callbacks, train={"output_dir": str(tmp_path)}
    )
    assert (outcome.signal, outcome.global_step) == (signal.SIGINT, 5)
    assert events(tmp_path)[-1]["signal"] == "SIGINT"
    assert not (tmp_path / STOP).exists()


@pytest.mark.parametrize(
    ("interval", "num_looks"), [pytest.param(0.0, 2 + 8, marks=pytest.mark.proof), (1e9, 2)]
)
def test_the_file_is_looked_for_no_more_often_than_a_heartbeat_is_written(
    interval, num_looks, project, tmp_path, monkeypatch
):
    """Always before its 8 steps and after them."""
    looks = []
    monkeypatch.setattr(launches, "INTERVAL", interval)
    monkeypatch.setattr(launches, "exists", lambda path: looks.append(path))
    surefoot.train(project.recipe, train={"output_dir": str(tmp_path)})
    assert len(looks) == num_looks


def test_a_stop_that_an_earlier_launch_was_to_make_is_not_made(project, tmp_path, monkeypatch):
    monkeypatch.setattr(launches, "INTERVAL", 0.0)
    request_stop(tmp_path)
    assert surefoot.train(project.recipe, train={"output_dir": str(tmp_path)}).global_step == 8


def test_a_request_that_cannot_be_removed_is_an_error_not_a_stop_of_every_launch(project, tmp_path):
    (tmp_path / STOP).mkdir()
    with pytest.raises(RunError, match=r"\.stop: a request to stop that cannot be removed"):
        surefoot.train(project.recipe, train={"output_dir": str(tmp_path)})
    (tmp_path / STOP).rmdir()  # the cure
    assert surefoot.train(project.recipe, train={"output_dir": str(tmp_path)}).global_step == 8


def test_a_signal_that_would_be_read_as_a_kill_is_refused(tmp_path):
    built = small.trainer(tmp_path, At(1, request(signal.SIGKILL)))
    with pytest.raises(ValueError, match=r"control\.stop_signal: expected one of SIGTERM, SIGINT"):
        built.fit()


def test_all_ranks_stop_and_none_is_started_again(project, tmp_path):
    run = tmp_path / "run"
    more = [f"train.output_dir={run}", "train.max_steps=100000", "checkpoint.save_steps=null"]
    ranks = ["parallel.num_processes=2", "parallel.max_restarts=3"]
    process = start("train", project.recipe, *more, *ranks)
    wait_for_a_step(run, process)
    done = stop(run)
    code = process.wait(60)
    written = process.communicate()
    assert (done.exit_code, code) == (0, 128 + signal.SIGINT), (done.output, written)
    (saved,) = checkpoints(run)
    step = int(saved.name.removeprefix("checkpoint-"))
    assert f"stopped at step {step}, saved" in done.stderr
    named = [row["event"] for row in events(run) if row["event"] not in ("log", "surroundings")]
    assert named == ["launch", "end"]


def test_only_a_run_that_trains_can_be_stopped(tmp_path):
    assert "no such folder; name the folder of a run" in refused(tmp_path / "none")
    (tmp_path / "launches.jsonl").write_text(json.dumps({"event": "launch", "host": "other"}))
    (tmp_path / ".lock").touch()
    assert "no process is training there; the run is died" in refused(tmp_path)
    assert not (tmp_path / STOP).exists()
    with (tmp_path / ".lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stopped(tmp_path, "--no-wait")
    assert (tmp_path / STOP).exists()


@pytest.mark.proof
def test_ranks_leave_together_after_rank_0_has_recorded_the_end(project, tmp_path, monkeypatch):
    """A launcher such as `srun --kill-on-bad-exit` ends all when one has left."""
    ended = LaunchRecord.ended

    def late(self, *outcome):
        time.sleep(1.0 if self.callbacks else 0.0)  # of rank 0, which may upload
        ended(self, *outcome)

    monkeypatch.setattr(LaunchRecord, "ended", late)
    recipe = load(project.recipe, {"train.output_dir": str(tmp_path / "run")})

    def work():
        outcome = run(recipe, callbacks=[At(3, request(signal.SIGTERM))])
        assert outcome.signal == signal.SIGTERM
        assert events(tmp_path / "run")[-1]["event"] == "end"

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    pids = []
    for rank in range(2):
        if (pid := os.fork()) == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            try:
                work()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]


def test_the_command_of_a_launch_is_that_of_who_starts_it(project, tmp_path):
    recipe = load(project.recipe, {"train.output_dir": str(tmp_path), "train.max_steps": 1})
    run(recipe, command="surefoot launch recipe.yaml --on ray")
    assert events(tmp_path)[0]["command"] == "surefoot launch recipe.yaml --on ray"
