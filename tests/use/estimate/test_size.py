"""The size of checkpoints, against those that a run really saves, and the disk they need."""

import pytest

import surefoot
from each import some
from project import Project
from surefoot.checkpoint.disk.retention import RetentionPolicy
from surefoot.recipe.recipe import load
from surefoot.use.estimate._rank_memory import Machine
from surefoot.use.estimate._saving import (
    CheckpointSize,
    disk_needed,
    most_at_once,
    saved_steps,
    snapshot_size,
)
from surefoot.use.estimate.plan import make_plan

ALONE = Machine(1, on_gpu=False)
FOUR_SAVES = {"train": {"max_steps": 4}, "checkpoint": {"save_steps": 1}}
METHODS = ["full", {"freeze": {"num_layers": 1}}, {"lora": {"rank": 4}}]


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *some(
            [*zip(["qwen2", "llama", "qwen2"], METHODS, strict=True)],
            [("qwen2", METHODS[2])],
        ),  # a bias, and none
        *(
            pytest.param(kind, method, marks=pytest.mark.proof)
            for kind, method in zip(["llama", "qwen2", "llama"], METHODS, strict=True)
        ),
    ],
    ids=str,
)
def test_a_saved_checkpoint_has_the_size_that_was_told(tmp_path, kind, method):
    sections = {"method": method} if isinstance(method, dict) else {}
    project = Project(tmp_path / "p", kind, **FOUR_SAVES, **sections)
    saving = make_plan(load(project.recipe), ALONE).saving
    surefoot.train(project.recipe)
    newest = project.run / "checkpoint-4"
    assert saving.size.total == pytest.approx(size_of(newest), rel=0.01)
    weights = sum(path.stat().st_size for path in newest.glob("*model*.safetensors"))
    assert saving.size.weights == weights
    assert saving.size.optimizer == (newest / "optimizer.safetensors").stat().st_size
    assert (saving.saves, saving.at_once) == (4, 4)
    inodes = {p.stat().st_ino: p.stat().st_size for p in project.run.glob("checkpoint-*/*")}
    on_disk = sum(inodes.values())  # three of them are left: the fourth lay there for a moment
    told = saving.disk - saving.size.total + saving.size.unchanging
    assert told == pytest.approx(on_disk, rel=0.02)


def test_large_models_are_split_into_files(tmp_path):
    project = Project(tmp_path / "p", train={"max_steps": 1}, checkpoint={"max_shard_size": 20_000})
    size = make_plan(load(project.recipe), ALONE).saving.size
    surefoot.train(project.recipe)
    assert size.total == pytest.approx(size_of(project.run / "checkpoint-1"), rel=0.01)


def test_a_snapshot_is_shared_out_over_the_processes():
    size = CheckpointSize(weights=1000, optimizer=2001, rest=10, unchanging=0)
    assert snapshot_size(size, 1, is_adapter=False) == 3001
    assert snapshot_size(size, 4, is_adapter=False) == 751
    assert snapshot_size(size, 4, is_adapter=True) == 1000 + 501


def test_the_steps_that_are_saved():
    by_steps = {"steps": 25, "steps_per_epoch": 10, "save_steps": 10, "save_epoch": False}
    assert saved_steps(**by_steps) == [10, 20, 25]
    assert saved_steps(**{**by_steps, "save_steps": None}) == [25]
    both = {**by_steps, "save_steps": 8, "save_epoch": True}
    assert saved_steps(**both) == [8, 10, 16, 20, 24, 25]


def test_one_more_than_are_kept_lies_there_while_it_is_written():
    saves = range(10, 101, 10)
    assert most_at_once(saves, RetentionPolicy(keep=3), 0) == 4
    assert most_at_once(saves, RetentionPolicy(keep=3), 1) == 5
    assert most_at_once(saves, RetentionPolicy(), 1) == 10
    assert most_at_once(saves, RetentionPolicy(keep=1, keep_every=50), 0) == 3
    assert most_at_once([7], RetentionPolicy(keep=3), 1) == 1


def test_what_never_changes_is_shared_by_several_checkpoints():
    size = CheckpointSize(weights=1000, optimizer=200, rest=10, unchanging=900)
    assert disk_needed(size, 4, saves=4, most_sharing=8) == 900 + 4 * 310
    assert disk_needed(size, 4, saves=4, most_sharing=2) == 2 * 900 + 4 * 310
    assert disk_needed(size, 4, saves=9, most_sharing=2) == 3 * 900 + 4 * 310  # 2, 3 | 4, 5 ...
    assert disk_needed(size, 4, saves=9, most_sharing=1) == 4 * 900 + 4 * 310
    assert disk_needed(size, 1, saves=9, most_sharing=8) == 900 + 310
