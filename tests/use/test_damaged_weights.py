"""One flipped bit of a tensor is found by whatever reads it: a run's checkpoint is skipped, aloud,
and one that is named is an error with the name of the file."""

import json
import shutil
from contextlib import nullcontext

import pytest

import surefoot
from commands import refused
from damage import flip
from each import some
from folders import save_recipe
from surefoot.errors import DamagedFileError
from surefoot.parallel.section import ParallelSection
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe import load
from surefoot.use import export, open_model
from surefoot.use.run_evaluation import evaluate_run

METHODS = {"adapter_model.safetensors": {"lora": {"rank": 2}}, "model.safetensors": "full"}


@pytest.fixture(scope="module", params=some(METHODS, ["adapter_model.safetensors"]))
def project(request, tmp_path_factory):
    """A finished run with checkpoints 2 and 4, and the name of its weights."""
    folder = tmp_path_factory.mktemp("project")
    surefoot.train(save_recipe(folder, method=METHODS[request.param]))
    return folder, request.param


@pytest.fixture
def damaged(project, tmp_path):
    """A copy of it, with the last bit of a tensor flipped in checkpoint-4."""
    folder, weights = project
    shutil.copytree(folder / "run", tmp_path / "run")
    recipe = save_recipe_like(folder, tmp_path)
    flip(tmp_path / "run" / "checkpoint-4" / weights)
    return tmp_path / "run", weights, recipe


def save_recipe_like(folder, other):
    recipe = json.loads((folder / "recipe.yaml").read_text())
    recipe["train"]["output_dir"] = str(other / "run")
    (other / "recipe.yaml").write_text(json.dumps(recipe))
    return other / "recipe.yaml"


def test_a_named_checkpoint_is_an_error_that_names_the_file(damaged):
    run, weights, _ = damaged
    with pytest.raises(DamagedFileError, match=rf"checkpoint-4/{weights}: .* has changed since"):
        open_model(run / "checkpoint-4")
    assert open_model(run / "checkpoint-2").folder == run / "checkpoint-2"


def test_the_damaged_newest_checkpoint_of_a_run_is_skipped_aloud(damaged, caplog):
    run, weights, _ = damaged
    opened = open_model(run)
    assert opened.folder == run / "checkpoint-2"
    assert f"checkpoint-4 is skipped: {run}/checkpoint-4/{weights}" in caplog.text


def test_a_run_of_which_every_checkpoint_is_damaged_is_an_error(damaged):
    run, weights, _ = damaged
    flip(run / "checkpoint-2" / weights)
    with pytest.raises(surefoot.errors.CheckpointError, match="none of its checkpoints is valid"):
        open_model(run)


def test_an_evaluation_says_which_checkpoint_it_is_of(damaged):
    _, _, recipe = damaged
    report = evaluate_run(load(recipe), ALONE, ParallelSection(), progress=quiet, limit=2)
    assert report.model == "checkpoint-2"


def quiet(*_):
    """A bar that shows nothing."""
    return nullcontext(lambda *_: None)


def test_an_export_of_the_run_is_of_the_valid_checkpoint(damaged, tmp_path, caplog):
    run, weights, _ = damaged
    out = export(run, tmp_path / "out")
    assert "checkpoint-4 is skipped" in caplog.text
    expected = export(run / "checkpoint-2", tmp_path / "expected")
    name = "model.safetensors"
    assert (out / name).read_bytes() == (expected / name).read_bytes()
    with pytest.raises(DamagedFileError, match=weights):
        export(run / "checkpoint-4", tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_the_command_names_the_file_without_a_traceback(damaged):
    run, weights, _ = damaged
    prompts = run / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1?"}\n')
    checkpoint = run / "checkpoint-4"
    for words in (
        ("predict", checkpoint, "--prompts", prompts, "--output", run / "out.jsonl"),
        ("chat", checkpoint, "--prompt", "1+1?"),
        ("eval", run.parent / "recipe.yaml", "--model", "checkpoint-4"),
    ):
        assert weights in refused(*words)


def test_training_from_a_damaged_checkpoint_is_refused(damaged, tmp_path):
    run, weights, _ = damaged
    field = "adapter" if weights.startswith("adapter") else "path"
    recipe = json.loads((run.parent / "recipe.yaml").read_text())
    recipe["model"][field] = str(run / "checkpoint-4")
    recipe["train"]["output_dir"] = str(tmp_path / "next")
    with pytest.raises(DamagedFileError, match=weights):
        surefoot.train(recipe)


def test_a_damaged_tokenizer_of_the_base_stops_training(project, tmp_path):
    folder, weights = project
    if weights.startswith("adapter"):
        pytest.skip("an adapter is not a base")
    base = shutil.copytree(folder / "run" / "checkpoint-4", tmp_path / "base")
    path = base / "tokenizer_config.json"
    path.write_bytes(path.read_bytes() + b"\n")
    recipe = json.loads((folder / "recipe.yaml").read_text())
    recipe["model"]["path"] = str(base)
    recipe["train"]["output_dir"] = str(tmp_path / "next")
    with pytest.raises(DamagedFileError, match=r"tokenizer_config\.json"):
        surefoot.train(recipe)


def test_a_copy_in_the_cache_of_a_hub_is_checked_through_its_links(project, tmp_path):
    folder, weights = project
    there, here = folder / "run" / "checkpoint-4", tmp_path / "snapshot"
    here.mkdir()
    kept = ("manifest.json", "config.json", "adapter_config.json", "tokenizer", weights)
    for path in there.iterdir():
        if path.name.startswith(kept):
            shutil.copy(path, tmp_path / path.name)
            (here / path.name).symlink_to(tmp_path / path.name)
    from surefoot.checkpoint.verification import ConcurrentCheck

    with ConcurrentCheck([here]) as check:
        assert check.wait() is None
    flip(tmp_path / weights)
    with ConcurrentCheck([here]) as check:
        assert weights in str(check.wait())
