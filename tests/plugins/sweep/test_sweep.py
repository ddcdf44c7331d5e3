"""Sweeps of real runs: killed, resumed, several at once, with trials that fail."""

import json
import os
import shutil
import signal
import sys
import time

import pytest
from ruamel.yaml import YAML

from commands import refused
from project import Project, assert_same, checkpoints, final_weights, losses, start, surefoot
from surefoot.plugins.sweep.objective import choose_objective
from surefoot.plugins.sweep.space import open_space
from surefoot.plugins.sweep.sweep import SearchSettings, Sweep
from surefoot.recipe.recipe import load

RATES = "optim.adamw.learning_rate=1e-4..1e-2:log"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    data, train = {"val_size": 4}, {"max_steps": 24, "eval_steps": 8}
    lora = {"lora": {"rank": 2, "dropout": 0.1}}
    saves = {"save_steps": 6}
    return Project(folder, data=data, train=train, method=lora, checkpoint=saves)


@pytest.fixture(scope="module")
def done(project):
    """A sweep that nothing disturbed."""
    command = ("sweep", project.recipe, RATES, "--trials", "2", "--sampler", "random")
    code, out, err = surefoot(*command, "--json", "--jobs", "2")
    assert code == 0, err
    return json.loads(out), err


def test_trials_are_ordinary_runs_and_the_best_recipe_is_written(project, done):
    found, err = done
    folder = project.folder / "run-sweep"
    assert found["output"] == str(folder)
    assert "minimize eval_loss, at the last evaluation" in err
    values = {one["number"]: one["value"] for one in found["trials"]}
    for one in found["trials"]:
        run = folder / one["folder"]
        results = json.loads((run / "all_results.json").read_text())
        assert (one["value"], one["step"]) == (results["eval_loss"], 24)
        recipe = load(run / "recipe.yaml")
        assert recipe.optim.learning_rate == one["values"]["optim.adamw.learning_rate"]
        assert len(losses(run)) == 24
    assert found["best"] == min(values, key=values.get)
    best = load(folder / "best.yaml")
    rate = found["trials"][found["best"]]["values"]["optim.adamw.learning_rate"]
    assert best.optim.learning_rate == rate
    assert best.train.output_dir == folder / f"best-trial-{found['best']:04d}", "of its own"
    code, _, err = surefoot("train", folder / "best.yaml", "train.max_steps=1")
    assert code == 0, err
    assert not (folder / f"trial-{found['best']:04d}/checkpoint-1").exists()


def wait_for(condition, process):
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.parametrize(
    "how",
    [
        "power lost",
        pytest.param(signal.SIGKILL, marks=pytest.mark.proof),
        pytest.param(signal.SIGINT, marks=pytest.mark.proof),
    ],
)
def test_a_killed_sweep_resumes_half_run_trials_to_the_last_bit(project, done, tmp_path, how):
    command = ["sweep", project.recipe, RATES, "--trials", "2", "--sampler", "random"]
    command += ["--output", tmp_path / "sweep", "--json"]
    process = start(*command)
    half = tmp_path / "sweep/trial-0001"
    wait_for(lambda: half.is_dir() and checkpoints(half), process)
    trial = json.loads((half / ".heartbeat.json").read_text())["pid"]
    process.send_signal(signal.SIGINT if how == signal.SIGINT else signal.SIGKILL)
    if how == "power lost":
        os.kill(trial, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == (130 if how == signal.SIGINT else -9)
    assert len(losses(half)) < 24
    code, out, err = surefoot(*command)
    assert code == 0, err
    assert "trial 1: resumed:" in err
    found, expected = json.loads(out), done[0]
    assert found["trials"] == expected["trials"]
    for number in range(2):
        run, other = (
            folder / f"trial-{number:04d}"
            for folder in (tmp_path / "sweep", project.folder / "run-sweep")
        )
        assert_same(final_weights(run), final_weights(other))
    before = sorted((tmp_path / "sweep").glob("trial-*/checkpoint-*"))
    code, out, err = surefoot(*command)
    assert json.loads(out)["trials"] == expected["trials"]
    assert "resumed:" not in err, "nothing is left to do"
    assert sorted((tmp_path / "sweep").glob("trial-*/checkpoint-*")) == before


def test_other_ranges_are_refused_and_more_trials_are_not(project, done):
    command = ["sweep", project.recipe, "--sampler", "random", "--trials", "3"]
    folder = project.folder / "run-sweep"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    code, _, err = surefoot(*command, "optim.adamw.learning_rate=1e-4..2e-2:log")
    assert code == 2
    assert (
        "contains a sweep with other settings (ranges: optim.adamw.learning_rate=1e-4..1e-2:log -> "
        in err
    )
    code, _, err = surefoot(*command, RATES, "train.max_steps=50", "--seed", "7")
    assert code == 2
    assert "seed: 0 -> 7; train.max_steps: 24 -> 50" in err
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert after == before


def test_trials_of_which_nobody_knows_what_was_searched_are_refused(project, done, tmp_path):
    """Else trials of other settings would be compared with them."""
    folder = shutil.copytree(project.folder / "run-sweep", tmp_path / "sweep")
    lines = (folder / "study.journal").read_text().splitlines(keepends=True)
    (folder / "study.journal").write_text("".join(li for li in lines if '"ranges"' not in li))
    code, _, err = surefoot("sweep", project.recipe, RATES, "--output", folder)
    assert code == 2
    assert "does not say what was searched; choose another --output" in err


def test_a_failed_trial_stops_nobody_and_a_bad_one_ends_early(project, tmp_path):
    rates = "optim.adamw.learning_rate=3e-3,1e30,1e-7"
    command = ["sweep", project.recipe, rates, "method=full", "--sampler", "grid"]
    command += ["--pruner", "median", "--prune-after", "1", "--output", tmp_path / "sweep"]
    code, out, err = surefoot(*command)
    assert code == 0, err
    assert "trial 1: failed: " in err
    assert "NaN" in err
    results = json.loads((tmp_path / "sweep/results.json").read_text())
    good, broken, slow = results["trials"]
    assert (good["state"], broken["state"], slow["state"]) == ("complete", "failed", "pruned")
    assert results["best"] == 0
    assert slow["reason"] == "worse than the median at 8", "however late the sweep has looked"
    assert slow["step"] == 8
    best = YAML(typ="safe").load(tmp_path / "sweep/best.yaml")
    assert best["optim"]["adamw"]["learning_rate"] == 3e-3
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows if row and row[0].isdigit()] == ["0", "1", "2"]


class Killed:
    """The process of a trial, killed at its first checkpoint or once it is complete."""

    def __init__(self, folder, arguments, when):
        self.folder, self.when, self.process = folder, when, start(*arguments)
        self.code = None

    def poll(self):
        name = {"complete": "all_results.json", "half": "checkpoint-6"}.get(self.when, "never")
        is_due = (self.folder / name).exists()
        if self.code is None and (is_due or self.process.poll() is not None):
            if is_due:
                self.process.kill()
            self.process.communicate()
            self.code = -signal.SIGKILL if is_due else self.process.returncode
        return self.code

    def send_signal(self, number):
        self.process.send_signal(number)


@pytest.mark.parametrize("kills", [["half"], ["half", "half"], ["complete"]])
def test_a_trial_that_something_else_kills_is_resumed_once(kills, project, done, tmp_path):
    """And one that is complete counts, however its process ended."""
    space, said, kills = open_space(project.recipe, [RATES]), [], list(kills)
    objective = choose_objective(space.base, [key.key for key in space.keys], None, None)
    search = SearchSettings(num_trials=1, sampler="random", seed=0, pruner="none", prune_after=1)
    is_lost, is_half = len(kills) == 2, kills[0] == "half"

    def begin(folder, arguments):
        return Killed(folder, arguments, kills.pop(0) if kills else None)

    (trial,) = Sweep(tmp_path, space, objective, search, [begin], said.append).run().trials
    assert not kills
    assert trial.state == ("failed" if is_lost else "complete")
    assert is_lost or trial.value == done[0]["trials"][0]["value"]
    assert any("resumed, once" in line for line in said) == is_half


@pytest.mark.parametrize("damage", [b"\xff\x00", b"[" * 100_000, b'{"op_code": 99}\n', b"[1]\n"])
def test_a_damaged_study_is_named(damage, project, done, tmp_path):
    folder = shutil.copytree(project.folder / "run-sweep", tmp_path / "sweep")
    lines = (folder / "study.journal").read_bytes().splitlines(keepends=True)
    (folder / "study.journal").write_bytes(b"".join([*lines[:2], damage + b"\n", *lines[2:]]))
    code, _, err = surefoot("sweep", project.recipe, RATES, "--output", folder)
    assert code == 2, err
    assert "study.journal: not a study that optuna can read" in err
    assert "Traceback" not in err


def test_a_folder_of_something_else_is_left_alone(project, tmp_path):
    command = ["sweep", project.recipe, RATES, "--output", tmp_path]
    (tmp_path / "trial-0000").mkdir()
    code, _, err = surefoot(*command)
    assert code == 2
    assert "contains trial-0000, but no study.journal" in err
    assert not (tmp_path / "study.journal").exists()


def test_without_optuna_the_error_says_what_to_install(project, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("surefoot.plugins.sweep.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert "pip install -e '.[sweep]'" in refused("sweep", project.recipe, RATES)
