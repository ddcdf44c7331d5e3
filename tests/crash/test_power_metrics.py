"""The power fails while a run logs and saves: the log has every step of the newest checkpoint."""

import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint.sample import sample_states
from surefoot.checkpoint.saving._writing import write
from surefoot.checkpoint.saving.preparation import prepare
from surefoot.checkpoint.verification import find_latest
from surefoot.storage import files
from surefoot.training.callback import TrainerControl, TrainerState
from surefoot.training.callbacks.launches import NAME as LAUNCHES
from surefoot.training.callbacks.launches import LaunchFiles
from surefoot.training.callbacks.metric_files import METRICS, Jsonl

from .power import Disk, write_tree

STEPS = (1, 2, 3)


def run(root, beside=(METRICS,)):
    """Log a step, save it, and so on."""
    log = Jsonl(root / METRICS)
    log.on_train_begin(None, TrainerState(), TrainerControl())
    for step in STEPS:
        record = {"step": step, "loss": 1 / step}
        log.on_log(None, TrainerState(), TrainerControl(), logs=record)
        job, live = prepare(root, step, sample_states(step))
        write(replace(job, beside=beside), live)


def missing(scratch, **options):
    """For each content that a power cut may leave, the steps of its newest checkpoint that are
    not in the log."""
    root = Path(tempfile.mkdtemp(dir=scratch))
    files.os = disk = Disk(root, samples=2)
    try:
        run(root, **options)
    finally:
        files.os = os
    found = []
    for content in {repr(c): c for moment in disk.moments for c in moment}.values():
        write_tree(scratch / "cut", content)
        found.append(lost_at(scratch / "cut"))
        shutil.rmtree(scratch / "cut")
    return found


def lost_at(root):
    newest = find_latest(root).path
    last = 0 if newest is None else int(newest.name.split("-")[1])
    logged = set()
    for line in (root / METRICS).read_bytes().splitlines() if (root / METRICS).exists() else ():
        if line.strip(b"\0").startswith(b"{") and line.endswith(b"}"):
            logged.add(json.loads(line.strip(b"\0"))["step"])
    return set(range(1, last + 1)) - logged


@pytest.mark.parametrize("beside", [pytest.param((METRICS,), marks=pytest.mark.proof), ()])
def test_no_step_of_a_checkpoint_is_missing_in_the_log(beside, scratch):
    lost = [steps for steps in missing(scratch, beside=beside) if steps]
    assert bool(lost) == (not beside)  # without the flush the model finds losses


def test_a_file_beside_the_checkpoints_may_be_missing(tmp_path):
    job, live = prepare(tmp_path, 1, sample_states(1))
    write(replace(job, beside=("never.written",)), live)
    assert find_latest(tmp_path).path == tmp_path / "checkpoint-1"


def test_the_files_of_a_folder_beside_the_checkpoints_are_flushed_too(tmp_path, monkeypatch):
    (tmp_path / "tensorboard").mkdir()
    for name in ("events.1", "events.2"):
        (tmp_path / "tensorboard" / name).write_bytes(b"e")
    flushed, own = [], files.File.sync

    def sync(file):
        flushed.append((file.path.name, (tmp_path / "checkpoint-1").exists()))
        own(file)

    monkeypatch.setattr(files.File, "sync", sync)
    job, live = prepare(tmp_path, 1, sample_states(1))
    write(replace(job, beside=("tensorboard",)), live)
    assert {("events.1", False), ("events.2", False), ("tensorboard", False)} <= set(flushed)


def test_a_launch_that_has_begun_is_known_after_a_power_cut(scratch):
    """Before its first save, too, with which the log of launches is flushed."""
    root = Path(tempfile.mkdtemp(dir=scratch))
    files.os = disk = Disk(root, samples=2)
    try:
        launch = LaunchFiles(root)
        launch.begin("surefoot train x.yaml")
        num_moments = len(disk.moments)
        launch.log(step=1)
        launch.end("complete")
    finally:
        files.os = os
    assert len(disk.moments) > num_moments
    for moment in disk.moments[num_moments:]:
        for content in moment:
            write_tree(scratch / "cut", content)
            first, *_ = (scratch / "cut" / LAUNCHES).read_bytes().splitlines()
            assert json.loads(first)["command"] == "surefoot train x.yaml"
            shutil.rmtree(scratch / "cut")
