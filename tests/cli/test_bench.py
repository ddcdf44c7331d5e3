"""The bench command: a screen to read, JSON to compute with, and errors as everywhere."""

import json

import pytest

import commands
from project import Project
from surefoot.cli import bench
from surefoot.use.bench import PHASES

_, ok, refused = commands.of("bench", "--steps", "1")


@pytest.fixture(autouse=True)
def _one_product(monkeypatch):
    """Of matrices, for the speed that this processor could reach; else it takes half a second."""
    monkeypatch.setattr("surefoot.use.bench._SECONDS", 0)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    size = {"global_batch_size": 2, "micro_batch_size": 2}
    return Project(tmp_path_factory.mktemp("p") / "p", data={"packing": False}, train=size)


def test_the_descriptions_are_those_of_the_phases():
    assert tuple(bench.PHASES) == PHASES


def test_the_recipe_alone_is_told_on_a_screen_and_one_process_of_several_is_said_to_be_one(project):
    several = ["parallel.num_processes=2", "train.global_batch_size=4"]
    shown = ok(project.recipe, *several)
    for words in (
        "tokens/s",
        "of them trained",
        "of the positions",
        "that a product of matrices",
        "AdamW",
    ):
        assert words in shown
    for phase in PHASES:
        assert f"\n{phase} " in shown
    assert "measured as one rank of 2: its 2 examples per step on the full model" in shown
    assert not project.run.exists()


def test_all_figures_are_printed_as_json(project):
    shown = ok(project.recipe, "optim.adamw.learning_rate=0.01", "--json")
    found = json.loads(shown)
    assert (found["steps"], found["num_processes"], found["examples_a_step"]) == (1, 1, 2)
    assert found["tokens_per_second"] > 0
    assert found["utilisation"] > 0
    assert found["shares"].keys() == set(PHASES)
    assert not project.run.exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train.micro_batch_sise=2"], "did you mean micro_batch_size"),
        (["parallel.num_processes=3"], "is not a multiple of"),
    ],
)
def test_a_mistake_is_told_without_a_traceback(project, args, words):
    assert words in refused(project.recipe, *args)
