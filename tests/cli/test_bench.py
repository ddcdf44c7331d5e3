"""The bench command: a screen to read, JSON to compute with, and errors as everywhere."""

import json

import pytest
from click.testing import CliRunner

import forks
from project import Project
from surefoot.cli import bench
from surefoot.cli.main import main
from surefoot.recipe.recipe import load
from surefoot.storage import child
from surefoot.use.bench._trial import TrialFailure
from surefoot.use.bench.measurement import PHASES
from surefoot.use.bench.search import Search, SingleRankRecipe
from surefoot.use.estimate.fitting import Fit
from use.bench.made_up import figures

SIZE = "train.micro_batch_size"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    size = {"global_batch_size": 2, "micro_batch_size": 2}
    return Project(tmp_path_factory.mktemp("p") / "p", data={"packing": False}, train=size)


@pytest.fixture(autouse=True)
def _warm(monkeypatch):
    monkeypatch.setattr(child, "subprocess", forks)


def run(*args):
    return CliRunner().invoke(main, ["bench", *map(str, args), "--steps", "1"])


def test_the_descriptions_are_those_of_the_phases():
    assert tuple(bench.PHASES) == PHASES


def test_the_recipe_alone_is_told_on_a_screen_and_one_process_of_several_is_said_to_be_one(project):
    several = ["parallel.num_processes=2", "train.global_batch_size=4"]
    done = run(project.recipe, *several, "--no-search")
    assert done.exit_code == 0, done.stderr
    for words in (
        "tokens/s",
        "of them trained",
        "of the positions",
        "that a product of matrices",
        "AdamW",
    ):
        assert words in done.stdout
    for phase in PHASES:
        assert f"\n{phase} " in done.stdout
    assert "measured as one rank of 2: its 2 examples per step on the full model" in done.stdout
    assert "micro_batch_size" not in done.stdout
    assert not project.run.exists()


def test_other_settings_are_tried_and_a_failing_one_is_a_row(project, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")  # so model.compile is refused
    done = run(project.recipe, "optim.adamw.learning_rate=0.01", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["steps"], found["changes"], found["failure"]) == (1, {}, None)
    assert found["tokens_per_second"] > 0
    assert found["utilisation"] > 0
    assert found["shares"].keys() == set(PHASES)
    names = {name for trial in found["tried"] for name in trial["changes"]}
    assert names == {SIZE, "data.packing", "model.compile"}, "recomputation makes room for nothing"
    lines = done.stderr.splitlines()
    assert "measuring the recipe" in lines
    assert any(line.startswith("the recipe as it is: ") and "tokens/s" in line for line in lines)
    assert any("model.compile=true: failed: " in line for line in lines)
    failed = [trial for trial in found["tried"] if trial["failure"]]
    assert [list(trial["changes"])[-1] for trial in failed] == ["model.compile"]
    assert "no-such-compiler" in failed[0]["failure"]
    assert found["command"].startswith(f"surefoot train {project.recipe} optim.adamw.learning")
    for name in found["best"]["changes"]:
        assert f"{name}=" in found["command"]
    assert not project.run.exists()


def shown(project, outcomes, capsys, *, is_over=lambda: False):
    """The screen after trials whose outcomes are known by their changes."""
    recipe = load(project.recipe, ["train.global_batch_size=8"])
    search = Search(recipe, outcomes, [Fit("none", 8, 0, [1, 2, 4, 8])], is_over)
    list(search.run())
    bench.show(
        search, SingleRankRecipe(recipe, 1), ["surefoot", "train", "my recipe.yaml", f"{SIZE}=4"]
    )
    return capsys.readouterr().out


def test_the_fastest_settings_are_told_as_a_command(project, capsys):
    def outcomes(changes):
        if changes.get(SIZE) == 8:
            return TrialFailure("out of memory\nand more")
        compiling = 7.0 if "model.compile" in changes else 0.0
        return figures(150 if changes.get(SIZE) == 4 else 100, compiling=compiling)

    out = shown(project, outcomes, capsys)
    assert "\nas it is " in out
    assert "× 1.50" in out
    assert "failed: out of memory\n" in out
    assert "7 s to compile" in out
    assert "is 1.50 times as fast" in out
    assert f"surefoot train 'my recipe.yaml' {SIZE}=4" in out


def test_where_nothing_is_faster_that_is_said(project, capsys):
    out = shown(project, lambda changes: figures(100), capsys)
    assert "no setting is faster than the recipe" in out


def test_what_works_where_the_recipe_does_not_is_told(project, capsys):
    out = shown(project, lambda c: figures(10) if c.get(SIZE) == 1 else TrialFailure("no"), capsys)
    assert "this works, with the same result except for rounding:" in out


def test_what_there_was_no_time_for_is_named(project, capsys):
    out = shown(project, lambda changes: figures(100), capsys, is_over=lambda: True)
    assert "not tried: the limit of 15 minutes is reached" not in out, (
        "nothing was tried, so there is no table"
    )
    times = iter([False] * 2 + [True] * 99)
    out = shown(project, lambda changes: figures(100), capsys, is_over=lambda: next(times))
    assert "not tried: the limit of 15 minutes is reached" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train.micro_batch_sise=2"], "did you mean micro_batch_size"),
        (["parallel.num_processes=3"], "is not a multiple of"),
    ],
)
def test_a_mistake_is_told_without_a_traceback(project, args, words):
    done = run(project.recipe, *args)
    assert done.exit_code == 2
    assert words in done.stderr
    assert "Traceback" not in done.output
