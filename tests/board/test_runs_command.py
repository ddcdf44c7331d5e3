import json

import pytest
from click.testing import CliRunner

from board.runs import COMPLETE, RECIPE, write_run
from surefoot.cli.main import main


@pytest.fixture
def root(tmp_path):
    one = write_run(tmp_path / "runs/one", end=COMPLETE)
    write_run(tmp_path / "runs/two", steps=400, recipe=RECIPE.replace("1.0e-3", "2.0e-3"))
    row = {"origin": "a:1", "prompt": "1+1", "answer": "2\x1b[31m", "match": True}
    (one / "generations-base.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path / "runs"


def runs(*arguments, code=0):
    result = CliRunner().invoke(main, ["runs", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def as_json(*arguments):
    return json.loads(runs(*arguments, "--json"))


def test_runs_are_filtered_by_words(root):
    assert [row["run"] for row in as_json("ls", root, "--filter", "lora complete")["runs"]] == [
        "one"
    ]


def test_what_the_board_shows_is_on_the_terminal_and_json(root):
    table = runs("ls", root)
    assert "one" in table
    assert "died" in table
    found = as_json("show", root / "two")
    assert (found["row"]["state"], found["row"]["step"]) == ("died", 400)
    assert "learning_rate" in found["recipe"]
    assert "grad_norm" in runs("show", root / "two")
    series = as_json("curves", root / "two", "--names=loss,grad_norm", "--points=20", "--smooth=3")
    assert series["series"].keys() == {"loss", "grad_norm"}
    assert len(series["series"]["loss"]["smooth"]["steps"]) <= 24
    assert "loss, mean" in runs("curves", root / "two", "--smooth=3")
    (change,) = as_json("diff", root / "one", root / "two")["changes"]
    assert (change["path"], change["new"]) == ("optim.adamw.learning_rate", 2e-3)
    assert "optim.adamw" in runs("diff", root / "one", root / "two")
    assert as_json("samples", root / "one")["files"][0]["name"] == "generations-base.jsonl"
    assert as_json("samples", root / "one", "generations-base.jsonl")["rows"][0]["prompt"] == "1+1"
    shown = runs("samples", root / "one", "generations-base.jsonl")
    assert "1+1" in shown
    assert "\x1b" not in shown
    assert "no samples" in runs("samples", root / "two")


def test_what_is_no_run_is_said(root):
    assert f"surefoot runs ls {root}" in runs("show", root, code=2)
    assert "has no metric nix" in runs("curves", root / "two", "--names=loss,nix", code=2)
    assert "has no samples ../x" in runs("samples", root / "one", "../x", code=2)
    assert "does not exist" in runs("ls", root / "nowhere", code=2)
