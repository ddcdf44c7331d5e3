"""All processes of a run must see one folder: each writes its part of every checkpoint there."""

import errno
import fcntl
import logging
import os

import pytest

import ranks
from surefoot.data.section import DataSection
from surefoot.errors import RunError
from surefoot.methods import Full
from surefoot.model.section import ModelSection
from surefoot.optim._variants.adamw import AdamW
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe import Recipe
from surefoot.run import folder as run_folder
from surefoot.stages import SFT
from surefoot.training.section import TrainSection


def recipe(folder):
    return Recipe(
        model=ModelSection(path="unused"),
        data=DataSection(datasets=("unused",)),
        method=Full(),
        stage=SFT(),
        train=TrainSection(output_dir=folder),
        optim=AdamW(),
    )


def why(world, folder):
    """What opening ``folder`` says."""
    try:
        with run_folder.opened(recipe(folder), world):
            return sorted(path.name for path in folder.iterdir())
    except RunError as error:
        return str(error)


def test_two_that_see_one_folder_leave_nothing_but_the_lock(tmp_path):
    assert ranks.run(2, lambda world: why(world, tmp_path / "run")) == [[".lock"], [".lock"]]


def test_folders_of_two_machines_are_refused_by_both(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "_SIGHT", 0.2)
    found = ranks.run(2, lambda world: why(world, tmp_path / str(world.rank)))
    for rank, said in enumerate(found):
        assert f"rank 1 does not see the folder {tmp_path / str(rank)} of rank 0" in said
        assert "train.cache_dir" in said


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_without_locks_a_run_starts_and_says_what_is_not_noticed(
    code, tmp_path, monkeypatch, caplog
):
    def flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING):
        assert why(ALONE, tmp_path / "run") == [".lock"]
    assert "this file system has no locks" in caplog.text


def test_a_lock_that_fails_is_one_sentence(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(fcntl, "flock", flock)
    found = why(ALONE, tmp_path / "run")
    assert found.startswith(f"train.output_dir: cannot lock {tmp_path / 'run'}: ")
    assert "another machine has replaced or removed it" in found
