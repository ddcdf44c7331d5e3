"""Other settings of a recipe: each is a recipe that divides as the run's own does."""

import pytest

from surefoot.recipe.recipe import read
from surefoot.use.other_settings import RECOMPUTE, SIZE, changed, changes, resized, value


def recipe(**train):
    return read(
        {
            "model": {"path": "none"},
            "data": {"datasets": ["none"]},
            "stage": "sft",
            "train": {"output_dir": "none", **train},
        }
    )


@pytest.mark.parametrize(
    ("times", "part", "ranks", "expected"),
    [
        (2, 1, 1, {SIZE: 6}),
        (2, 1, 2, {SIZE: 6}),
        (2, 1, 4, {}),  # 12 examples are not 4 x 6
        (1, 3, 4, {SIZE: 1}),
        (1, 2, 1, {}),  # 3 examples have no half
        (4, 1, 1, {SIZE: 12}),
        (8, 1, 1, {}),
    ],
)
def test_a_micro_batch_of_another_size_divides_the_batch(times, part, ranks, expected):
    made = recipe(global_batch_size=12, micro_batch_size=3)
    assert resized(made, times, part, num_data_ranks=ranks) == expected


def test_settings_of_a_section_change_together():
    made = recipe(global_batch_size=8, micro_batch_size=2)
    several = changed(made, {"parallel.num_processes": 4})
    found = changed(several, {"parallel.dp_shard": 2, "parallel.tp": 2, RECOMPUTE: "full"})
    assert (found.parallel.dp_shard, found.parallel.tp, value(found, RECOMPUTE)) == (2, 2, "full")
    assert made.model.gradient_checkpointing == "none"


def test_every_other_setting_is_said_to_be_what_its_recipe_is():
    made = changed(recipe(global_batch_size=8, micro_batch_size=2), {"parallel.num_processes": 2})
    found = list(changes(made, 2))
    assert {SIZE, RECOMPUTE, "parallel.tp"} <= {name for each in found for name in each.values}
    for each in found:
        assert {name: value(each.recipe, name) for name in each.values} == each.values
