"""The pages for other loops, done as a reader does them: every block of Python is run."""

import shutil

import pytest
from pages import ROOT, blocks

import tiny
from surefoot.checkpoint import find_latest
from surefoot.checkpoint.disk.commit import committed

HOW_TO = ROOT / "docs" / "how-to"


def run(page):
    namespace = {}
    for block in blocks(HOW_TO / page, "python"):
        exec(compile(block.text, str(block), "exec"), namespace)
    return namespace


def test_the_page_about_other_loops_works_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second time, the loop has ended, and goes on from there
        first = committed(tmp_path / "runs" / "plain")
        for path in first:
            path.rename(tmp_path / "gone")
        for name in ("cut", "whole", "renamed"):  # nothing is ever overwritten
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        run("as-a-library.md")
        assert capsys.readouterr().out.startswith("True []\n{'")
    assert [path.name for path in committed(tmp_path / "runs" / "mine")] == [
        "checkpoint-60",
        "checkpoint-80",
        "checkpoint-100",
    ]


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")  # there is no GPU
def test_the_page_about_the_trainer_trains_and_goes_on(tmp_path, capsys):
    train = run("with-the-trainer.md")["train"]
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 16
    for _ in range(2):
        trainer = train(tiny.model().train(), rows, str(tmp_path))
        assert trainer.state.global_step == 6
    assert find_latest(tmp_path).path == tmp_path / "checkpoint-6"
