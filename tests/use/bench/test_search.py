"""What is tried, in which order, and what is taken; speeds are made up here."""

import pytest

from surefoot.recipe.recipe import read
from surefoot.use.bench._trial import TrialFailure
from surefoot.use.bench.search import Search
from surefoot.use.estimate.fitting import Fit
from use.bench.made_up import figures

SIZE, PACKING = "train.micro_batch_size", "data.packing"
RECOMPUTE, COMPILE = "model.gradient_checkpointing", "model.compile"


def recipe(micro=4, whole=16, **sections):
    return read(
        {
            "model": {"path": "model", **sections.get("model", {})},
            "data": {"datasets": ["none"]},
            "stage": "sft",
            "train": {"output_dir": "run", "global_batch_size": whole, "micro_batch_size": micro},
        }
    )


def fit(policy, size, whole=16):
    sizes = [each for each in range(1, whole + 1) if whole % each == 0]
    return Fit(policy, size, 0, sizes)


def search(measure, *fits, **settings):
    found = Search(recipe(**settings), measure, fits)
    assert list(found.run())
    return found


def tried(found):
    return [trial.changes for trial in found.trials]


def test_figures_are_sums_divided():
    found = figures(100)
    assert found.tokens_per_second == pytest.approx(100)
    assert found.trained_tokens_per_second == pytest.approx(50)
    assert found.step_seconds == pytest.approx(1)
    assert found.padding == pytest.approx(0.2)
    assert found.utilisation == pytest.approx(0.5)
    assert found.shares == pytest.approx({"data": 0.25, "forward": 0.75})


def test_where_nothing_helps_each_setting_is_tried_once_and_the_recipe_stays():
    found = search(lambda changes: figures(100), fit("none", 16))
    assert tried(found) == [{}, {SIZE: 16}, {SIZE: 8}, {PACKING: False}, {COMPILE: True}]
    assert found.best is found.trials[0]


def test_the_largest_that_fits_is_halved_as_long_as_it_helps_and_the_rest_is_tried_on_top():
    def speed(changes):
        return figures(200 - 10 * abs(changes.get(SIZE, 1) - 4))

    found = search(speed, fit("none", 16), micro=1)
    assert tried(found) == [
        {},
        {SIZE: 16},
        {SIZE: 8},
        {SIZE: 4},
        {SIZE: 2},
        {SIZE: 4, PACKING: False},
        {SIZE: 4, COMPILE: True},
    ]
    assert search(lambda c: figures(c.get(SIZE, 1)), fit("none", 16), micro=1).best.changes == {
        SIZE: 16
    }


def test_sizes_divide_the_batch():
    found = search(lambda c: figures(1 / c.get(SIZE, 9)), fit("none", 9, 18), micro=9, whole=18)
    assert [changes[SIZE] for changes in tried(found) if SIZE in changes][:3] == [3, 1, 1]


def test_a_gain_that_may_be_chance_is_none():
    assert not search(lambda changes: figures(102 if changes else 100)).best.changes


def test_the_recipe_is_measured_again_before_something_else_is_called_faster():
    speeds = iter([50, *[100] * 4, 99])
    found = search(lambda changes: figures(next(speeds)), fit("none", 16))
    assert next(speeds, None) is None
    assert found.best is found.trials[0]


def test_a_failure_is_a_trial_and_never_the_best():
    failed = TrialFailure("out of memory")
    found = search(lambda changes: failed if changes else figures(1), fit("none", 16))
    assert len(found.trials) == 6, "the sizes down to the recipe's, and two switches"
    assert found.best is found.trials[0]


def test_where_the_recipe_fails_what_fits_is_tried():
    failed = TrialFailure("out of memory")
    found = search(lambda c: figures(10) if c.get(SIZE) == 1 else failed, fit("none", 2))
    assert tried(found)[:3] == [{}, {SIZE: 2}, {SIZE: 1}]
    assert found.best.changes == {SIZE: 1}


def test_recomputation_is_tried_where_it_makes_room_for_larger_passes():
    def measure(changes):
        size = changes.get(SIZE, 4)
        return figures(10 * size * (0.8 if changes.get(RECOMPUTE) else 1))

    found = search(measure, fit("none", 4), fit("selective", 4), fit("full", 16))
    assert found.best.changes == {RECOMPUTE: "full", SIZE: 16}
    assert not any(changes.get(RECOMPUTE) == "selective" for changes in tried(found))


def test_compiling_must_pay_within_the_run():
    def measure(changes, steps):
        is_on = changes.get(COMPILE)
        return figures(150 if is_on else 100, compiling=60 * bool(is_on), run_steps=steps)

    assert search(lambda c: measure(c, 1000)).best.changes == {COMPILE: True}
    assert search(lambda c: measure(c, 100)).best.changes == {}


def test_what_the_recipe_has_on_is_tried_off():
    found = search(
        lambda changes: figures(100 if COMPILE in changes else 50),
        fit("none", 4),
        model={"compile": True, "gradient_checkpointing": True},
    )
    assert {RECOMPUTE: "none"} in tried(found)
    assert found.best.changes == {COMPILE: False}


def test_after_the_time_is_over_the_rest_is_named_and_not_tried():
    found = Search(recipe(), lambda changes: figures(100), [fit("none", 16)], lambda: True)
    assert [trial.changes for trial in found.run()] == [{}]
    assert {COMPILE: True} in found.left_out
