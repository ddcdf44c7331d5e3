"""The convert command."""

import json

import pytest
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from checkpoint.sample import sample_states
from folders import save_recipe
from surefoot.checkpoint.save import save
from surefoot.recipe.recipe import load
from surefoot.run import build

from .runner import run

ADAPTER = {"lora": {"rank": 2}}


@pytest.fixture(scope="module", params=["full", ADAPTER], ids=["model", "adapter"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    path = save_recipe(folder, method=request.param, train={"max_steps": 2, "eval_steps": None})
    build(load(path)).fit()
    return folder / "run" / "checkpoint-2"


def test_a_checkpoint_becomes_the_trainers(checkpoint, tmp_path):
    target = tmp_path / "out" / "checkpoint-2"
    done = run("convert", checkpoint, target, "--to", "trainer")
    assert done.exit_code == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    count = len(list(target.iterdir()))
    assert first.startswith(f"wrote {target} ({count} files, ")
    assert second.startswith("go on with TrainingArguments(output_dir=..., max_steps=2, ")
    assert third == f"and trainer.train(resume_from_checkpoint='{target}')"
    assert get_last_checkpoint(str(tmp_path / "out")) == str(target)


def test_json_says_what_was_written_and_how_to_go_on(checkpoint, tmp_path):
    target = tmp_path / "out"
    told = json.loads(run("convert", checkpoint, target, "--to", "trainer", "--json").stdout)
    assert (told["path"], told["to"]) == (str(target), "trainer")
    assert told["files"] == {p.name: p.stat().st_size for p in target.iterdir()}
    arguments = told["training_arguments"]
    assert arguments["learning_rate"] == 0.003
    assert TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **arguments)


def test_a_checkpoint_becomes_a_plain_model(checkpoint, tmp_path):
    done = run("convert", checkpoint, tmp_path / "out", "--to", "huggingface", "--json")
    assert done.exit_code == 0, done.stderr
    assert "training_arguments" not in json.loads(done.stdout)
    assert not list((tmp_path / "out").glob("*optimizer*"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_mistakes_are_told_plainly(checkpoint, tmp_path):
    taken = run("convert", checkpoint, checkpoint.parent, "--to", "trainer")
    assert taken.exit_code == 2
    assert "it exists already; choose another folder" in taken.stderr
    model = checkpoint.parents[1] / "model"
    done = run("convert", model, tmp_path / "out", "--to", "trainer")
    assert done.stderr.startswith(f"error: {model}: ")
    assert "--to" in run("convert", checkpoint, tmp_path / "out").stderr
    assert "pickle" in run("convert", checkpoint, tmp_path / "out", "--to", "pickle").stderr
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_its_recipe_is_told(checkpoint, tmp_path):
    lone = tmp_path / checkpoint.name
    lone.mkdir()
    for path in checkpoint.iterdir():
        (lone / path.name).write_bytes(path.read_bytes())
    manifest = lone / "manifest.json"
    assert "recipe.yaml" in manifest.read_text()
    (lone / "recipe.yaml").unlink()
    done = run("convert", lone, tmp_path / "out", "--to", "trainer")
    assert done.exit_code == 2
    assert "recipe.yaml" in done.stderr
    save(tmp_path, 7, sample_states(), kind="full")
    done = run("convert", tmp_path / "checkpoint-7", tmp_path / "out", "--to", "trainer")
    assert done.exit_code == 2
    assert "it has no recipe.yaml, which says how its optimizer was made" in done.stderr
