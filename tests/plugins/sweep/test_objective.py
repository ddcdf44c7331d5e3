import json
import math
from dataclasses import replace

import pytest

from surefoot.data.section import DataSection
from surefoot.errors import RecipeError
from surefoot.plugins.sweep import objective
from surefoot.plugins.sweep.objective import Objective, _incomparable, choose_objective
from surefoot.plugins.sweep.space import open_space
from surefoot.recipe.recipe import Recipe
from surefoot.schema import SameRows, paths, setting_at, settings

from .test_space import RECIPE

LAST = Objective("eval_loss", "minimize", "last")
BEST = Objective("eval_loss", "minimize", "best")
TENTH = Objective("loss", "minimize", "tenth")
EVALS = [{"step": 5, "loss": 9.0}, {"step": 5, "eval_loss": 2.0}, {"step": 10, "eval_loss": 3.0}]


def test_an_evaluation_counts_at_its_step_and_the_last_or_the_best_decides():
    assert LAST.evaluations(EVALS) == [(5, 2.0), (10, 3.0)]
    assert LAST.outcome(EVALS) == (10, 3.0)
    assert BEST.outcome(EVALS) == (5, 2.0)
    assert LAST.outcome([]) is None


def test_nan_is_no_value_and_never_the_best():
    records = [*EVALS, {"step": 15, "eval_loss": None}]
    step, value = LAST.outcome(records)
    assert (step, math.isnan(value)) == (15, True)
    assert BEST.outcome(records) == (5, 2.0)
    logs = [{"step": step, "loss": None if step == 20 else 1.0} for step in range(1, 21)]
    step, value = TENTH.outcome(logs)
    assert (step, math.isnan(value)) == (20, True)


def test_a_training_loss_is_a_mean_over_the_last_tenth_of_the_steps():
    logs = [{"step": step, "loss": float(step)} for step in range(1, 41)]
    assert TENTH.outcome(logs) == (40, 38.5)
    assert TENTH.outcome(logs[:25]) == (25, 24.0), "a run that stopped early has ended there"
    assert TENTH.outcome([]) is None
    assert not TENTH.evaluations(logs)


@pytest.fixture
def choose(tmp_path):
    def choose(*arguments, metric=None, direction=None, is_space=False, **sections):
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps({**RECIPE, **sections}))
        space = open_space(path, arguments or ["method.lora.rank=8,16"])
        if is_space:
            return space.base
        return choose_objective(space.base, [key.key for key in space.keys], metric, direction)

    return choose


DATA = {**RECIPE["data"], "val_size": 8}
TRAIN = {**RECIPE["train"], "eval_steps": 5}


def test_the_held_out_metric_decides_where_there_are_held_out_rows(choose):
    assert choose() == TENTH
    assert "mean of its logs in the last tenth of the steps" in str(choose())
    assert choose(data=DATA, train=TRAIN) == LAST
    best = {**TRAIN, "load_best_model_at_end": True}
    assert choose(data=DATA, train=best) == BEST
    accuracy = {**TRAIN, "metric_for_best_model": "eval_token_accuracy"}
    assert choose(data=DATA, train=accuracy).direction == "maximize"
    assert choose(metric="grad_norm", direction="minimize").direction == "minimize"
    with pytest.raises(RecipeError, match=r"never evaluates; set train\.eval_steps"):
        choose(data=DATA)
    with pytest.raises(RecipeError, match="no held-out rows"):
        choose(metric="eval_loss")


@pytest.mark.parametrize(
    "argument",
    ["stage=sft,pt", "data.val_size=4,8", "data.cutoff_len=64..128", "train.seed=1,2"],
)
def test_losses_that_mean_different_things_are_not_compared(choose, argument):
    with pytest.raises(RecipeError, match=r"does not\s+compare"):
        choose(argument, data=DATA, train=TRAIN)
    assert choose(argument, data=DATA, train=TRAIN, metric="eval_loss") == LAST


def test_training_data_may_vary_if_the_held_out_rows_do_not(choose):
    held_out = {**RECIPE["data"], "eval_datasets": ["held"]}
    assert choose("data.datasets=[a],[a,b]", data=held_out, train=TRAIN) == LAST
    assert choose("data.shuffle=true,false", data=DATA, train=TRAIN) == LAST
    two = {**DATA, "datasets": ["a", "b"]}
    assert choose("data.mix_strategy=concat,interleave_once", data=two, train=TRAIN) == LAST
    with pytest.raises(RecipeError, match=r"does not compare"):
        choose("data.datasets=[a],[a,b]", data=DATA, train=TRAIN)


def test_what_may_change_on_a_resume_changes_no_metric(choose):
    base = choose(data=DATA, train=TRAIN, is_space=True)
    keys = [way for way in paths(Recipe) if (at := setting_at(Recipe, way)) and at.may_change]
    assert ("stage", "grpo", "sampler") in keys
    assert not [way for way in keys if _incomparable(base, ".".join(way), "eval_loss")]


def test_a_new_setting_says_by_its_mark_whether_trials_compare(choose, monkeypatch):
    base, key = choose(data=DATA, train=TRAIN, is_space=True), "data.buffer_size"
    assert "rows or tokens" in _incomparable(base, key, "eval_loss")
    now = replace(settings(DataSection)["buffer_size"], same_rows=SameRows())
    monkeypatch.setattr(objective, "setting_at", lambda _, keys: now if len(keys) == 2 else None)
    assert _incomparable(base, key, "eval_loss") is None
