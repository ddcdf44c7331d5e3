"""The longest row that fits is the longest one that a dry run of its own says fits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from project import Project
from surefoot.errors import RecipeError
from surefoot.recipe.recipe import load
from surefoot.use.estimate._dry_run import dry_run_batch
from surefoot.use.estimate._rank_memory import Machine, memory_of
from surefoot.use.estimate.plan import Trial, trials_of, usable_bytes
from surefoot.use.estimate.row_lengths import STEP, longest_rows

from .scene import batch

MEMORY = 900_000_000


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    train = {"max_steps": 2, "global_batch_size": 4, "micro_batch_size": 2, "precision": "fp32"}
    changes = {"data": {"train_on_prompt": True}, "checkpoint": {"async_save": False}}
    project = Project(tmp_path_factory.mktemp("rows"), train=train, **changes)
    return load(project.recipe, ["method=lora", "data.packing=true"])


def found(recipe, machine):
    return longest_rows(trials_of(recipe, machine), machine)


def peak(recipe, machine, policy, tokens):
    """Of one row, in which all tokens but the first are trained."""
    trial = Trial.of(recipe, machine, policy)
    measured = dry_run_batch(trial.rank_model, batch(recipe, tokens, prompt=0))
    return memory_of(trial.ground.with_size(1), trial.rank_model, measured).peak


def test_no_longer_row_fits_and_each_policy_has_a_longer_one_for_more(recipe):
    machine = Machine(1, on_gpu=True, capacity=MEMORY)
    limit = usable_bytes(machine, MEMORY, 0)
    rows = found(recipe, machine)
    assert [row.policy for row in rows] == ["none", "full", "offload"]
    lengths, costs = [row.tokens for row in rows], [row.per_token for row in rows]
    assert lengths == sorted(set(lengths))
    assert costs == sorted(set(costs), reverse=True)
    none, full, offload = rows
    assert none.num_bytes == peak(recipe, machine, "none", none.tokens) <= limit
    assert peak(recipe, machine, "none", int(1.02 * none.tokens) + STEP) > limit
    assert none.main_memory == full.main_memory == 0
    config = json.loads((Path(recipe.model.path) / "config.json").read_text())
    per_token = 4 * config["hidden_size"] * config["num_hidden_layers"]  # float32 inputs
    assert offload.main_memory == pytest.approx(per_token * offload.tokens, rel=0.1)


def test_what_cannot_be_known_is_refused(recipe):
    with pytest.raises(RecipeError, match="name it with --memory"):
        found(recipe, Machine(1, on_gpu=True))
    staged = replace(recipe, parallel=replace(recipe.parallel, pp=2))
    with pytest.raises(RecipeError, match="the run is a pipeline"):
        found(staged, Machine(2, on_gpu=True, capacity=MEMORY))
    (row, *_) = found(recipe, Machine(1, on_gpu=True, capacity=560_000_000))
    assert row.tokens == 0
