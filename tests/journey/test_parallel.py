"""Several processes learn what one learns, and go on from what any other number has saved."""

import json
import os
import shutil
import signal
import subprocess
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

import surefoot as library
from project import Project, checkpoints, in_child, losses, start, surefoot
from surefoot.checkpoint.disk.commit import being_written
from surefoot.checkpoint.layouts.opening import open_folder
from surefoot.checkpoint.sources import read_whole
from surefoot.checkpoint.verification import verify
from surefoot.recipe.recipe import load

CLOSE = 2e-5  # of losses and of weights after some steps of Adam: sums in another order


OPTIM = {"adamw": {"learning_rate": 0.003, "schedule": "constant"}}  # runs here change their length


def processes(count, **others):
    return [f"parallel.num_processes={count}", *(f"parallel.{n}={v}" for n, v in others.items())]


def alone(project, **overrides):
    """The run of one process, which needs no command."""
    assert in_child(lambda: library.train(project.recipe, **overrides)) == 0


def train(project, *overrides, code=0, **options):
    found, _, err = surefoot("train", project.recipe, *overrides, **options)
    assert found == code, err
    return err


def weights(folder):
    source = open_folder(folder)
    return {name: read_whole(source, name) for name in source.shapes()}


def assert_close(a, b):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=CLOSE)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    project = Project(tmp_path_factory.mktemp("one"), optim=OPTIM, train={"max_steps": 8})
    alone(project)
    return project


@pytest.mark.proof  # tests/distributed does it in forked processes
def test_two_processes_learn_what_one_learns_and_one_goes_on_from_them(one, tmp_path):
    project = Project(tmp_path, optim=OPTIM, train={"max_steps": 8})
    cold = subprocess.Popen  # a user's own start: each rank imports for itself
    train(project, *processes(2), "train.max_steps=6", popen=cold)
    saved = checkpoints(project.run)[-1]
    assert verify(saved, full=True).ok
    assert not list(saved.glob("rank_*"))
    assert AutoModelForCausalLM.from_pretrained(saved).num_parameters()
    train(project, *processes(1))
    ours, theirs = losses(project.run), losses(one.run)
    assert ours.keys() == theirs.keys()
    for step, loss in theirs.items():
        assert ours[step] == pytest.approx(loss, abs=CLOSE)
    assert_close(weights(checkpoints(project.run)[-1]), weights(checkpoints(one.run)[-1]))


@pytest.mark.proof
def test_two_that_share_the_layers_learn_and_measure_what_one_does_and_one_goes_on(tmp_path):
    train_section = {"max_steps": 8, "eval_steps": 3}
    sections = {"data": {"val_size": 5}, "train": train_section, "optim": OPTIM}
    project, single = Project(tmp_path / "two", **sections), Project(tmp_path / "one", **sections)
    alone(single)
    train(project, *processes(2, pp=2), "train.max_steps=6")
    saved = checkpoints(project.run)[-1]
    assert verify(saved, full=True).ok
    alone(project)
    ours, theirs = (history(checkpoints(p.run)[-1]) for p in (project, single))
    assert ours == {key: pytest.approx(value, abs=CLOSE) for key, value in theirs.items()}
    assert_close(weights(checkpoints(project.run)[-1]), weights(checkpoints(single.run)[-1]))


def history(saved):
    """What was logged, by step and name."""
    names = ("loss", "grad_norm", "eval_loss", "eval_token_accuracy")
    rows = json.loads((saved / "trainer_state.json").read_text())["log_history"]
    return {(row["step"], name): row[name] for row in rows for name in names if name in row}


def test_two_go_on_from_one_and_end_in_the_same_bits_when_killed(tmp_path):
    project = Project(tmp_path, optim=OPTIM, train={"max_steps": 20})
    alone(project, **{"train.max_steps": 3})
    whole = shutil.copytree(project.run, tmp_path / "whole")
    process = start("train", project.recipe, *processes(2))
    while process.poll() is None and num_logged(project) < 8:
        time.sleep(0.02)
    (server,) = children(process.pid)
    os.kill(children(server)[1], signal.SIGKILL)  # one rank dies
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert "Traceback" not in err, "the echoes of the others are not to be heard"
    deadline = time.monotonic() + 60
    while being_written(project.run) and time.monotonic() < deadline:
        time.sleep(0.05)
    train(project, *processes(2))
    train(project, *processes(2), f"train.output_dir={whole}")
    assert losses(project.run) == losses(whole)
    ours, theirs = (weights(checkpoints(run)[-1]) for run in (project.run, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def num_logged(project):
    path = project.run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: PTH123
        return [int(word) for word in file.read().split()]


@pytest.mark.proof
def test_sigterm_to_the_launcher_saves_the_step(tmp_path):
    project = Project(tmp_path, train={"max_steps": 400}, checkpoint={"save_steps": None})
    process = start("train", project.recipe, *processes(2, dp_replicate=2))
    while process.poll() is None and num_logged(project) < 3:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "run the same command to resume" in err
    (saved,) = checkpoints(project.run)
    assert verify(saved, full=True).ok
    assert int(saved.name.split("-")[1]) == max(losses(project.run))


@pytest.mark.proof
def test_without_batch_sizes_three_ranks_are_given_some_that_divide(tmp_path):
    project = Project(tmp_path, train={"max_steps": 1})
    for name in ("global_batch_size", "micro_batch_size"):
        del project.sections["train"][name]
    project.write()
    err = train(project, *processes(3))
    assert "train.global_batch_size: 18, train.micro_batch_size: 3 (not set; chosen for 3" in err
    assert load(project.run / "recipe.yaml").train.micro_batch_size == 3


def test_batches_that_do_not_divide_are_refused_in_one_sentence(tmp_path):
    project = Project(tmp_path, train={"global_batch_size": 2, "micro_batch_size": 2})
    err = train(project, *processes(2), code=2)
    assert err.count("error:") == 1
    assert "is not a multiple of train.micro_batch_size x data-parallel ranks (2 x 2 = 4)" in err
    assert "set train.micro_batch_size=1, which computes the same steps" in err
