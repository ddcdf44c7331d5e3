"""A run that writes MindSpore's form beside its checkpoints."""

import logging

import pytest

import commands
from folders import save_recipe
from surefoot.errors import RecipeError
from surefoot.recipe.recipe import load
from surefoot.run.training_run import run


def recipe(tmp_path, **settings):
    callbacks = [{"mindspore": settings}]
    train = {"callbacks": callbacks, "max_steps": 4, "load_best_model_at_end": False}
    return load(save_recipe(tmp_path, train=train))


@pytest.mark.parametrize(("checkpoints", "steps"), [("all", {2, 4}), ("last", {4})])
def test_every_save_or_the_last_alone_is_written(tmp_path, checkpoints, steps):
    run(recipe(tmp_path, checkpoints=checkpoints, parallel_config="model_parallel=2"))
    folders = {path.name for path in (tmp_path / "run").glob("mindspore-*")}
    assert folders == {f"mindspore-{step}" for step in steps}
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


def test_a_wrong_parallel_config_is_refused_with_the_recipe(tmp_path):
    with pytest.raises(RecipeError, match="parallel_config 'x=1': 'x' is none of data_parallel"):
        recipe(tmp_path, parallel_config="x=1")
