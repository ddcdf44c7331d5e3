"""A run that was ended between its last save and its results is finished by the next launch."""

import json
import os
import signal
from pathlib import Path

import pytest

import surefoot
from project import Project, losses
from surefoot.recipe.recipe import load
from surefoot.run.training_run import run
from surefoot.training.callback import TrainerCallback

CLOCK = ("_runtime", "_per_second", "save_blocking_seconds")


class Interrupt(TrainerCallback):
    """Sends this process a signal at the end of a step."""

    def __init__(self, step, number=signal.SIGTERM):
        self.step, self.number = step, number

    def on_step_end(self, args, state, control):
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


def results(folder):
    found = json.loads((folder / "all_results.json").read_text())
    return {name: value for name, value in found.items() if not name.endswith(CLOCK)}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ending")
    made = Project(folder, data={"val_size": 4}, train={"max_steps": 3, "eval_steps": 3})
    surefoot.train(made.recipe)
    return made


@pytest.mark.parametrize(
    "left", ["nothing", pytest.param("old results", marks=pytest.mark.proof), "half of the results"]
)
def test_what_the_end_of_a_run_writes_is_written_by_the_next_launch(left, project):
    expected, logged = results(project.run), losses(project.run)
    path = project.run / "all_results.json"
    text = path.read_text()
    for name in ("all_results.json", "metrics.jsonl", "loss.png"):
        (project.run / name).unlink()
    if left != "nothing":
        path.write_text(text.replace(": 3", ": 2") if left == "old results" else text[:40])
    assert surefoot.train(project.recipe).global_step == 3
    assert (results(project.run), losses(project.run)) == (expected, logged)
    assert (project.run / "loss.png").is_file()


def test_a_finished_run_is_left_alone(project, caplog):
    caplog.set_level("INFO")
    kept = [project.run / "all_results.json", *project.run.glob("checkpoint-3/*")]
    before = [path.stat().st_mtime_ns for path in kept]
    surefoot.train(project.recipe)
    assert [path.stat().st_mtime_ns for path in kept] == before
    assert "this run is complete: 3 of 3 steps" in caplog.text
    opened = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert project.run not in opened  # a disk with it can be unmounted


def test_a_run_that_has_more_steps_than_it_is_to_have_says_so(project, caplog):
    """It was "complete: 3 of 2 steps"."""
    caplog.set_level("INFO")
    run(load(project.recipe, ["train.max_steps=2"]))
    assert "complete: it has 3 steps, and is to have 2 now. To train longer, raise" in caplog.text


@pytest.mark.parametrize(
    "left",
    [
        pytest.param(b"", marks=pytest.mark.proof),
        b'{"step": 1, "lo',
        pytest.param(None, marks=pytest.mark.proof),
    ],
    ids=["empty", "torn", "gone"],
)
def test_the_metrics_of_a_finished_run_come_back(left, project):
    path = project.run / "metrics.jsonl"
    expected = losses(project.run)
    if left is None:
        path.unlink()
    else:
        path.write_bytes(left)
    surefoot.train(project.recipe)
    assert losses(project.run) == expected


def test_a_signal_in_the_last_step_leaves_a_finished_run(project, tmp_path):
    recipe = load(project.recipe, {"train.output_dir": str(tmp_path / "run")})
    outcome = run(recipe, callbacks=[Interrupt(3)])
    if outcome.signal is not None and outcome.state.pending:  # it broke the evaluation off
        outcome = run(recipe)
    assert results(tmp_path / "run") == results(project.run)
