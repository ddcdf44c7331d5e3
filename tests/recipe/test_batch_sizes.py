"""A recipe without batch sizes runs on any number of ranks; sizes that it sets are not touched."""

import pickle
from dataclasses import replace

import pytest

from surefoot.data.order.micro_batches import check_divides
from surefoot.errors import DataError
from surefoot.recipe.recipe import dump, read
from surefoot.recipe.recipe_data import with_batch_sizes
from surefoot.recipe.yaml import parse
from surefoot.schema import json_schema
from surefoot.training.section import TrainSection


def recipe(**train):
    return read(
        {
            "model": {"path": "org/model"},
            "data": {"datasets": ["x"]},
            "stage": "sft",
            "train": {"output_dir": "run", **train},
        }
    )


def test_sizes_that_are_not_set_divide_among_any_number_of_ranks():
    for ranks in range(1, 70):
        fitted, note = with_batch_sizes(recipe(), ranks)
        train = fitted.train
        check_divides(train.global_batch_size, train.micro_batch_size, ranks)
        assert train.micro_batch_size <= 4, ranks
        assert 16 <= train.global_batch_size < 16 + ranks
        assert (note is None) == (fitted == recipe()), ranks


@pytest.mark.parametrize(
    ("given", "ranks", "sizes", "said"),
    [
        ({}, 8, (16, 2), "train.micro_batch_size: 2 (not set; chosen for 8 data-parallel ranks)"),
        ({}, 3, (18, 3), "train.global_batch_size: 18, train.micro_batch_size: 3 (not set; "),
        ({"micro_batch_size": 4}, 8, (32, 4), "train.global_batch_size: 32 (not set; "),
        ({"global_batch_size": 16}, 8, (16, 2), "train.micro_batch_size: 2 (not set; "),
        ({"micro_batch_size": 8}, 3, (24, 8), "train.global_batch_size: 24 (not set; "),
    ],
)
def test_only_the_sizes_that_are_not_set_are_chosen_and_named(given, ranks, sizes, said):
    fitted, note = with_batch_sizes(recipe(**given), ranks)
    assert (fitted.train.global_batch_size, fitted.train.micro_batch_size) == sizes
    assert note.startswith(said)
    assert note.count("train.") == said.count("train.")


def passed_on(given):
    """The ways on which a recipe reaches a run."""
    yield given
    yield replace(given, train=replace(given.train, max_steps=3))
    yield read(given, {"train.max_steps": 3})
    yield pickle.loads(pickle.dumps(given))


def test_sizes_that_are_set_are_known_from_equal_defaults_wherever_a_recipe_goes():
    for unset in passed_on(recipe()):
        assert with_batch_sizes(unset, 8)[1] is not None
    given = recipe(global_batch_size=16, micro_batch_size=4)
    assert given == recipe()
    for explicit in (*passed_on(given), read(recipe(), ["train.global_batch_size=16"])):
        assert explicit.train.global_batch_size == 16
        assert type(explicit.train.global_batch_size) is int
    assert with_batch_sizes(given, 8) == (given, None)
    section = TrainSection(output_dir="run", global_batch_size=16, micro_batch_size=4)
    assert with_batch_sizes(replace(given, train=section), 8)[1] is None


def test_the_text_of_a_recipe_says_the_sizes_that_are_not_set_as_numbers():
    assert parse(dump(recipe())).data["train"]["global_batch_size"] == 16
    described = json_schema(TrainSection)["properties"]["micro_batch_size"]
    kinds = [each.get("type") for each in described["anyOf"]]
    assert (kinds[0], described["default"]) == ("integer", 4)
    assert type(described["default"]) is int


def test_a_global_batch_that_is_set_stays():
    fitted, _ = with_batch_sizes(recipe(global_batch_size=24), 12)
    assert (fitted.train.global_batch_size, fitted.train.micro_batch_size) == (24, 2)
    odd = recipe(global_batch_size=24)
    assert with_batch_sizes(odd, 7) == (odd, None)


@pytest.mark.parametrize(
    ("sizes", "cure"),
    [
        ((16, 8, 8), {"micro_batch_size": 2, "global_batch_size": 64}),
        ((16, 4, 8), {"micro_batch_size": 2, "global_batch_size": 32}),
        ((16, 4, 3), {"global_batch_size": 24}),
        ((24, 4, 7), {"global_batch_size": 28}),
    ],
)
def test_sizes_that_are_set_and_do_not_divide_are_refused_with_cures_that_work(sizes, cure):
    size, micro, ranks = sizes
    given = recipe(global_batch_size=size, micro_batch_size=micro)
    with pytest.raises(DataError) as refused:
        fitted = with_batch_sizes(given, ranks)[0].train
        check_divides(fitted.global_batch_size, fitted.micro_batch_size, ranks)
    for name, value in cure.items():
        assert f"train.{name}={value}" in str(refused.value)
        train = recipe(**{"global_batch_size": size, "micro_batch_size": micro, name: value}).train
        check_divides(train.global_batch_size, train.micro_batch_size, ranks)
