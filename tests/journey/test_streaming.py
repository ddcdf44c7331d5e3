"""Training goes on while the data is still being encoded, and no step of it is lost either."""

import json
import random
from collections import deque

import pytest

import surefoot
from project import Project, assert_same, checkpoints, final_weights, in_child, losses, rows
from surefoot.data.training_data import encode_stream
from surefoot.errors import DataError, RecipeError
from surefoot.model.loading import resolve
from surefoot.recipe.recipe import load
from surefoot.recipe.recipe_data import build_codec, encoding_of
from test_never_lost import assert_no_worse_for_it, killed_again_and_again

MANY = 60


def streaming(folder, count=MANY, **sections):
    data = {
        "streaming": True,
        "buffer_size": 10,
        "val_size": 3,
        "cutoff_len": 64,
        "datasets": ["sums"],
        "cache_dir": str(folder / "cache"),
        **sections.pop("data", {}),
    }
    project = Project(folder, data=data, **sections)
    many = [rows(1)[0] | {"output": f"It is {i}."} for i in range(count)]
    (folder / "data" / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in many))
    return project


def encoded(project):
    """All of the data is in the cache."""
    recipe = load(project.recipe)
    deque(encode_stream(encoding_of(recipe, build_codec(recipe, resolve(recipe.model)))))
    return project


def trained(project):
    assert in_child(lambda: surefoot.train(project.recipe)) == 0
    return project


def test_killed_again_and_again_a_streaming_run_ends_in_the_same_bits(tmp_path):
    """It finds what the one before it has encoded; for the reference, all was there."""
    long = {"max_steps": 6, "eval_steps": 3}
    reference = trained(encoded(streaming(tmp_path / "whole", train=long)))
    project = streaming(tmp_path / "killed", train=long)
    assert killed_again_and_again(project, random.Random(1)) >= 1
    assert_no_worse_for_it(project, reference)
    assert len(losses(project.run)) == 6


def test_a_run_goes_on_without_the_cache_it_was_begun_with(tmp_path):
    slow = {"adamw": {"learning_rate": 0.003, "schedule": "constant", "warmup_steps": 0}}
    reference = streaming(tmp_path / "whole", train={"max_steps": 8}, optim=slow)
    project = streaming(tmp_path / "moved", train={"max_steps": 6}, optim=slow)
    for each in (reference, project):
        trained(encoded(each))
    project.sections["train"]["max_steps"] = 8
    project.sections["data"]["cache_dir"] = str(tmp_path / "another")
    project.write()
    trained(encoded(project))
    assert checkpoints(project.run)[-1].name == "checkpoint-8"
    assert losses(project.run) == losses(reference.run)
    assert_same(final_weights(project.run), final_weights(reference.run))


def test_epochs_count_once_everything_is_encoded(tmp_path):
    epochs = {"max_steps": None, "num_epochs": 2}
    project = streaming(tmp_path, data={"val_size": 0}, train=epochs)
    with pytest.raises(RecipeError, match=r"train.max_steps: needed with data.streaming"):
        surefoot.train(project.recipe)
    state = surefoot.train(encoded(project).recipe).state
    assert state.global_step == 2 * 15
    assert state.epoch == 2


def test_broken_data_that_comes_late_stops_the_run_with_its_reason(tmp_path):
    project = streaming(tmp_path, count=9, data={"val_size": 0, "max_broken_rows": 0})
    with (tmp_path / "data" / "sums.jsonl").open("a") as file:
        file.write("{\n")
    with pytest.raises(DataError, match=r"more than data.max_broken_rows = 0 .*\n  row 9: "):
        surefoot.train(project.recipe)
