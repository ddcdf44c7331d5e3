"""One process of a run: its share of the examples."""

import pytest

from surefoot.errors import DataError, RunError
from surefoot.recipe.recipe import read
from surefoot.recipe.recipe_data import SingleRankRecipe


def recipe(**parallel):
    return read(
        {
            "model": {"path": "model"},
            "data": {"datasets": ["none"]},
            "stage": "sft",
            "train": {"output_dir": "run", "global_batch_size": 16, "micro_batch_size": 4},
            "parallel": parallel,
        }
    )


def test_one_process_measures_its_share():
    found = SingleRankRecipe.of(recipe(num_processes=4, tp=2))
    assert found.num_processes == 4
    assert found.recipe.train.global_batch_size == 8
    assert found.recipe.parallel.tp == 1


def test_a_run_of_one_process_stays_as_it_is():
    assert SingleRankRecipe.of(recipe(num_processes=1)).recipe.train == recipe().train


@pytest.mark.parametrize(
    ("parallel", "words"), [({"num_processes": 3}, "4 x 3"), ({"num_processes": 8}, "4 x 8")]
)
def test_examples_that_do_not_divide_are_refused_as_in_training(parallel, words):
    with pytest.raises(DataError, match=words):
        SingleRankRecipe.of(recipe(**parallel))


def test_several_started_processes_are_refused(monkeypatch):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **address}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match="without torchrun"):
        SingleRankRecipe.of(recipe())
