"""The tutorial, done as a reader does it: every file written, every command and Python block run.

Training takes few steps here, so nothing is learnt; that it works from end to end is what counts.
"""

import re
import runpy
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from pages import DEMO, README, ROOT, SHELLS, STEP_45, TUTORIAL, blocks, name, steps

import forks
from each import some
from project import checkpoints, in_child
from surefoot.cli.main import main
from surefoot.data.rows.catalog import Catalog
from surefoot.recipe.recipe import load
from surefoot.storage import child

FEW = ["train.max_steps=4", "train.eval_steps=2", "checkpoint.save_steps=2", "data.max_samples=24"]
OWN = ROOT / "docs/how-to/own-model-and-data.md"
SHORTER = {"train": FEW, "preview": ["data.max_samples=24"], "eval": ["--limit", "2"]}
SHORTER["bench"] = ["--steps", "2"]
ONCE = {"make", "pip", "source"}  # how a reader got here, and CI as well
MAKES_THE_DEMO = ["surefoot", "demo"]  # what `make demo` runs


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder that looks like a fresh clone."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "rows.jsonl").write_text('{"question": "Who?", "answer": "Mira."}\n' * 40)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(child, "subprocess", forks)  # its process has imported
    return tmp_path


def follow(page):
    """Do what the page says, in order; what it shows of each command, and what that has written."""
    namespace, outputs = {}, []
    for block in blocks(page):
        if block.title:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.text)
        elif block.language == "python":
            exec(compile(with_real_steps(block.text), str(block), "exec"), namespace)
        elif block.language in SHELLS:
            for line, output in steps(block):
                outputs.append((output, type_in(line, output, where=f"{block}: {line}")))
    return outputs


def type_in(line, output, *, where):
    words = shlex.split(with_real_steps(line), comments=True)
    if words == MAKES_THE_DEMO:
        return ""
    if words[0] == "surefoot" and output.startswith("error:"):
        result = CliRunner().invoke(main, words[1:])
        assert (result.exit_code, result.output) == (2, output), where
    elif words[0] == "surefoot":
        result = CliRunner().invoke(main, [*words[1:], *SHORTER.get(words[1], [])], input="")
        assert result.exit_code == 0, f"{where}\n{result.output}"
        return result.output
    elif words[:3] == ["timeout", "-s", "KILL"]:
        assert train_and_be_killed([*words[6:], *FEW]) == -signal.SIGKILL, where
    elif words[0] == "python":
        runpy.run_path(words[1], run_name="__main__")
    elif words[0] not in ONCE:
        subprocess.run(with_real_steps(line), shell=True, check=True, stdout=subprocess.DEVNULL)
    return ""


def train_and_be_killed(arguments):
    """Exit code of ``surefoot train``, killed as soon as there is a checkpoint to go on from."""
    run = load(Path(arguments[0]), arguments[1:]).train.output_dir
    return in_child(
        lambda: main(["train", *arguments], standalone_mode=False),
        kill_when=lambda: checkpoints(run),
    )


def with_real_steps(text):
    """``text`` with the newest checkpoint of a run in place of one that only a full run has."""

    def newest(match):
        found = checkpoints(Path(match[1]))
        return str(found[-1]) if found else match[0]

    return re.sub(r"(runs/[\w-]+)/checkpoint-\d+", newest, text)


@pytest.mark.parametrize("page", some([README, DEMO, TUTORIAL], [README]), ids=name)
def test_a_page_works_from_top_to_bottom(page, desk, capsys):
    follow(page)


def without_figures(line):
    """Threads and processors have other last digits, and other speeds."""
    return re.sub(r" +", " ", re.sub(r"[-+]?\d[\d,.:]*(e[-+]\d+)?", "0", line))


@pytest.mark.proof
def test_the_page_of_a_spike_finds_the_planted_row(desk, monkeypatch):
    monkeypatch.setitem(globals(), "SHORTER", {})
    for shown, written in follow(STEP_45):
        lines = {without_figures(line) for line in written.splitlines()}
        other = [line for line in shown.splitlines() if without_figures(line) not in lines]
        assert set(other) <= {"…"}, written
    said = CliRunner().invoke(main, ["rows", "runs/planted", "--step", "45", "-n", "1"]).output
    assert "my/orders_planted.jsonl: line 465: loss 1" in said
    assert "[[xq zv kk 77" in said


def test_the_page_of_ones_own_model_trains_from_new_weights(desk):
    (block,) = [b for b in blocks(OWN, "console") if "new_weights" in b.text]
    for line, output in steps(block):
        type_in(f"{line} {' '.join(FEW)}", output, where=str(block))
    assert checkpoints(Path("runs/from-nothing"))


def test_own_data_is_trained_and_evaluated_on_without_the_shops_rows(desk):
    Path("mine.yaml").write_text(Path("examples/own.yaml").read_text())
    by_copy = load(
        Path("mine.yaml"), ["model.path=examples/base-model", "data.datasets=rows.jsonl"]
    )
    for recipe in (by_copy, load(Path("examples/own.yaml"), ["data.datasets=rows.jsonl"])):
        assert [entry.name for entry in Catalog(recipe.data).entries] == ["rows.jsonl"]
        assert recipe.data.val_size
        assert recipe.train.eval_epoch
