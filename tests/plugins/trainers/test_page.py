"""The how-to page, done as a reader does it, with a run of the Trainer to go on from."""

import contextlib
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from theirs import StopAfter, recipe_in, their_trainer
from transformers.trainer_utils import get_last_checkpoint

import commands
from surefoot.cli.train import _trainer_resume
from surefoot.errors import RunError
from surefoot.recipe.recipe import load

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "from-the-trainer.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def half_run(tmp_path_factory):
    """The folder the page speaks of: a model, its data, and half a run of the Trainer."""
    folder = tmp_path_factory.mktemp("desk")
    recipe_in(folder)
    (folder / "models").mkdir()
    (folder / "model").rename(folder / "models" / "base")
    with contextlib.chdir(folder):
        (yaml,) = blocks("yaml")
        Path("recipe.yaml").write_text(yaml)
        their_trainer(load(Path("recipe.yaml")), Path("theirs"), StopAfter(4)).train()
    return folder


@pytest.fixture
def desk(half_run, tmp_path, monkeypatch):
    """A copy of it, where the reader types."""
    monkeypatch.chdir(shutil.copytree(half_run, tmp_path / "desk"))


def type_in(command):
    return commands.run(*shlex.split(command)[1:])


def test_the_page_does_what_it_says(desk):
    (console,) = blocks("console")
    refused, trusted = re.findall(r"^\$ (.*)$", console, re.MULTILINE)
    done = type_in(refused)
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (2, console.splitlines()[1])
    assert type_in(trusted).exit_code == 0
    lines = [json.loads(line) for line in Path("runs/on/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 8
    state = json.loads(Path("runs/on/checkpoint-8/trainer_state.json").read_text())
    assert [r["step"] for r in state["log_history"]] == [1, 2, 3, 4, 8]
    parent = json.loads(Path("runs/on/checkpoint-8/manifest.json").read_text())["parent"]
    assert parent == "checkpoint-4"
    assert type_in(refused).exit_code == 0, "it has a checkpoint of its own now"

    (convert,) = blocks("sh")
    done = type_in(convert)
    assert done.exit_code == 0, done.stderr
    assert "TrainingArguments(output_dir=..., max_steps=8" in done.stdout
    (python,) = blocks("python")
    recipe = load(Path("recipe.yaml"), {"train": {"max_steps": 10}})
    trainer = their_trainer(recipe, Path("back"))
    exec(compile(python, "page", "exec"), {"trainer": trainer})
    assert trainer.state.global_step == 10
    assert get_last_checkpoint("back") == "back/checkpoint-10"


def test_a_run_of_the_trainer_is_resumed_beside_it_by_one_command(desk):
    Path("theirs/checkpoint-9").mkdir()  # as an interrupted save leaves it
    Path("theirs/checkpoint-9/optimizer.pt").touch()
    command = "surefoot train recipe.yaml train.output_dir=theirs"
    done = type_in(command)
    assert done.exit_code == 2
    assert "theirs contains checkpoint-4 of the Hugging Face Trainer, which is resum" in done.stderr
    assert "optimizer.pt, scheduler.pt are pickles" in done.stderr
    assert done.stderr.rstrip().endswith("if you trust them, add --trust-pickle")
    done = type_in(f"{command} --trust-pickle train.max_steps=6")
    assert done.exit_code == 0, done.stderr
    assert "resuming from checkpoint-4 at step 4" in done.stderr
    assert Path("theirs-surefoot/checkpoint-6/manifest.json").exists()
    assert sorted(path.name for path in Path("theirs").iterdir()) == [
        "checkpoint-4",
        "checkpoint-9",
    ]
    done = type_in(f"{command} train.max_steps=8")
    assert done.exit_code == 0, "nothing is asked again: the folder has checkpoints of its own"
    assert "resuming from checkpoint-6 at step 6" in done.stderr


def test_one_question_is_asked_on_a_terminal(desk, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    asked = []
    monkeypatch.setattr("click.confirm", lambda text, **_: asked.append(text))
    with pytest.raises(RunError, match="not resumed; choose another"):
        _trainer_resume(load(Path("recipe.yaml"), ["train.output_dir=theirs"]), trust_pickle=False)
    assert len(asked) == 1 and asked[0].endswith("nothing is executed. Resume?")


def test_a_run_that_goes_on_can_roll_back_to_where_it_came_from(desk):
    command = "surefoot train recipe.yaml checkpoint.resume=theirs/checkpoint-4 --trust-pickle "
    assert type_in(command + "train.on_nan=rollback").exit_code == 0
    assert Path("runs/on/checkpoint-4/manifest.json").exists()
