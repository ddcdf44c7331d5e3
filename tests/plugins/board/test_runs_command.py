import json

import pytest

import commands

from .runs import COMPLETE, RECIPE, write_run

run, runs, refused = commands.of("runs")


@pytest.fixture
def root(tmp_path):
    write_run(tmp_path / "runs/one", end=COMPLETE)
    write_run(tmp_path / "runs/two", steps=400, recipe=RECIPE.replace("1.0e-3", "2.0e-3"))
    return tmp_path / "runs"


def as_json(*arguments):
    return json.loads(runs(*arguments, "--json"))


def test_runs_are_filtered_by_words(root):
    assert [row["run"] for row in as_json(root, "--filter", "lora complete")["runs"]] == ["one"]


def test_what_the_board_shows_is_on_the_terminal_and_json(root):
    table = runs(root)
    assert "one" in table
    assert "died" in table
    (row,) = as_json(root / "two")["runs"]
    assert (row["state"], row["step"], row["evidence"]) == ("died", 400, "no_end")
    assert runs(root / "two").splitlines()[-1].split()[0] == "two"


def test_what_is_no_folder_is_said(root):
    assert "does not exist" in refused(root / "nowhere")
