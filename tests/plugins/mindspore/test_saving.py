"""A run that writes MindSpore's form beside its checkpoints."""

import logging
import shutil
from types import SimpleNamespace

import pytest

import commands
from folders import save_recipe
from surefoot.errors import RecipeError
from surefoot.plugins.mindspore import saving
from surefoot.recipe.recipe import load
from surefoot.run.training_run import run
from surefoot.storage.child import Child
from surefoot.training import TrainerControl, TrainerState


def recipe(tmp_path, max_steps=4, **settings):
    callbacks = [{"mindspore": settings}]
    train = {"callbacks": callbacks, "max_steps": max_steps, "load_best_model_at_end": False}
    return load(save_recipe(tmp_path, train=train))


@pytest.mark.parametrize(("checkpoints", "steps"), [("all", {2, 4}), ("last", {4})])
def test_every_save_or_the_last_alone_is_written(tmp_path, checkpoints, steps):
    (notes := tmp_path / "run" / "mindspore-notes").mkdir(parents=True)
    run(recipe(tmp_path, checkpoints=checkpoints, parallel_config="model_parallel=2"))
    folders = {path.name for path in (tmp_path / "run").glob("mindspore-*")}
    assert folders == {notes.name, *(f"mindspore-{step}" for step in steps)}
    saved, whole = tmp_path / "run" / "checkpoint-4", tmp_path / "whole"
    commands.ok("ckpt", "convert", saved, whole, "--to", "mindspore")
    commands.ok("ckpt", "diff", tmp_path / "run" / "mindspore-4", whole, "--only", "model")


def test_the_best_alone_is_written(tmp_path):
    best = run(recipe(tmp_path, checkpoints="best")).state.best_global_step
    assert [p.name for p in (tmp_path / "run").glob("mindspore-*")] == [f"mindspore-{best}"]


def test_a_write_that_fails_is_a_warning(tmp_path, caplog):
    (tmp_path / "run" / "mindspore-4").mkdir(parents=True)
    (tmp_path / "run" / "mindspore-4" / "mine").write_text("")
    with caplog.at_level(logging.WARNING):
        assert run(recipe(tmp_path)).state.global_step == 4
    assert "mindspore-4 is not written: " in caplog.text
    assert (tmp_path / "run" / "mindspore-2").is_dir()


def test_what_a_killed_launch_left_is_written_by_the_next_one(tmp_path):
    run(recipe(tmp_path, max_steps=2))
    shutil.rmtree(tmp_path / "run" / "mindspore-2")
    run(recipe(tmp_path))
    found = {path.name for path in (tmp_path / "run").glob("mindspore-*")}
    assert found == {"mindspore-2", "mindspore-4"}


def test_a_process_that_does_not_start_costs_the_others_nothing(tmp_path, monkeypatch, caplog):
    failures = iter([OSError("no memory")])

    def start(*words, **options):
        for error in failures:
            raise error
        return Child(*words, **options)

    monkeypatch.setattr(saving, "Child", start)
    callback = saving.MindSporeSaves()
    run(load(save_recipe(tmp_path, train={"max_steps": 2})))
    args = SimpleNamespace(output_dir=tmp_path / "run")
    callback._due = [1, 2]
    callback.on_train_end(args, TrainerState(), TrainerControl())
    assert "mindspore-1 is not written: no memory" in caplog.text
    assert (tmp_path / "run" / "mindspore-2").is_dir()


def test_a_wrong_parallel_config_is_refused_with_the_recipe(tmp_path):
    with pytest.raises(RecipeError, match="parallel_config 'x=1': 'x' is none of data_parallel"):
        recipe(tmp_path, parallel_config="x=1")
