"""What chat accepts, the other commands accept, too: the folder of a run, or a checkpoint."""

import json
import shutil

import pytest
from click.testing import CliRunner

import surefoot
from damage import flip
from folders import save_model, save_recipe
from surefoot.cli.main import main
from surefoot.errors import ModelError
from surefoot.recipe.recipe import load
from surefoot.run.resolving import resolved
from surefoot.use import open_model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run with two checkpoints, moved away from where it was trained."""
    folder = tmp_path_factory.mktemp("run")
    worst_is_best = {"load_best_model_at_end": True, "greater_is_better": True}
    path = save_recipe(folder, method="lora", train=worst_is_best)
    assert surefoot.train(path).best_global_step == 2
    return shutil.move(folder / "run", folder / "moved")


def said(*arguments):
    done = CliRunner().invoke(main, list(map(str, arguments)))
    return done.exit_code, done.stdout, done.stderr


def test_each_command_reads_the_folder_of_a_run(run):
    for arguments in (["preview", run, "--json"], ["plan", run, "--json"], ["recipe", "show", run]):
        code, out, err = said(*arguments)
        assert code == 0, err
        assert out
    code, out, err = said("eval", run, "--json")
    assert json.loads(out)["model"] == "checkpoint-2", "the best"
    code, out, err = said("eval", run / "checkpoint-4", "--json")
    assert json.loads(out)["model"] == "checkpoint-4"
    assert (run / "generations-checkpoint-4.jsonl").exists()


def test_train_resumes_the_run_of_a_folder_wherever_it_is(run):
    code, _, err = said("train", run)
    assert code == 0
    assert "this run is complete" in err
    code, _, err = said("train", run / "checkpoint-2")
    assert code == 2
    assert f"is a checkpoint. To resume its run, name {run}" in " ".join(err.split())


def test_an_adapter_is_continued_from_the_folder_of_its_run(run, tmp_path):
    recipe = run.parent / "recipe.yaml"
    found = resolved(load(recipe, [f"model.adapter={run}"]))
    assert found.model.adapter == run / "checkpoint-2", "the best, with which the run has ended"
    later = [f"model.adapter={run}", "train.output_dir=other"]
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text.replace("at_end: true", "at_end: false"))
    assert resolved(load(recipe, later)).model.adapter == run / "checkpoint-4"
    (run / "checkpoint-4/adapter_model.safetensors").rename(tmp_path / "moved")
    assert resolved(load(recipe, later)).model.adapter == run / "checkpoint-2", (
        "the latest valid one"
    )
    (tmp_path / "moved").rename(run / "checkpoint-4/adapter_model.safetensors")
    (run / "recipe.yaml").write_text(text)


def test_an_adapter_with_a_flipped_bit_is_passed_over_as_by_chat(run, tmp_path, caplog):
    shutil.copytree(run, tmp_path / "run")
    text = (run / "recipe.yaml").read_text().replace("at_end: true", "at_end: false")
    (tmp_path / "run/recipe.yaml").write_text(text)
    flip(tmp_path / "run/checkpoint-4/adapter_model.safetensors")
    overrides = [f"model.adapter={tmp_path / 'run'}", "train.output_dir=other"]
    found = resolved(load(run.parent / "recipe.yaml", overrides)).model.adapter
    assert found == tmp_path / "run/checkpoint-2" == open_model(tmp_path / "run").folder
    assert "checkpoint-4 is skipped: " in caplog.text
    assert "has changed since it was saved" in caplog.text


def test_a_damaged_best_checkpoint_of_an_adapter_is_passed_over_and_said(run, tmp_path, caplog):
    best = run / "checkpoint-2/adapter_model.safetensors"
    best.rename(tmp_path / "moved")
    found = resolved(load(run.parent / "recipe.yaml", [f"model.adapter={run}"])).model.adapter
    (tmp_path / "moved").rename(best)
    assert found == run / "checkpoint-4"
    assert "the best checkpoint, checkpoint-2, is damaged: using checkpoint-4" in caplog.text


def test_an_adapter_in_the_place_of_a_model_is_named(run, tmp_path):
    save_model(tmp_path / "model")
    overrides = {"model.path": str(run / "checkpoint-4"), "train.output_dir": str(tmp_path / "new")}
    with pytest.raises(ModelError, match=r"checkpoint-4 is an adapter; set model.adapter to it"):
        surefoot.train(run.parent / "recipe.yaml", **overrides)
    overrides["model.path"] = str(run)
    with pytest.raises(ModelError, match=r"checkpoint-\d is an adapter; set model.adapter to it"):
        surefoot.train(run.parent / "recipe.yaml", **overrides)


def test_the_folder_of_a_run_is_a_model_path_too(tmp_path):
    path = save_recipe(tmp_path, method="full")
    surefoot.train(path, **{"train.max_steps": 1, "train.output_dir": str(tmp_path / "run")})
    found = resolved(load(path, [f"model.path={tmp_path / 'run'}"])).model.path
    assert found == str(tmp_path / "run/checkpoint-1")
    (tmp_path / "run/checkpoint-1/manifest.json").unlink()
    assert resolved(load(path, [f"model.path={tmp_path / 'run'}"])).model.path == str(
        tmp_path / "run"
    )
