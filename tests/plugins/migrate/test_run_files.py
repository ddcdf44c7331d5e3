"""The model in the folder of a run of LLaMA-Factory."""

import shutil
from pathlib import Path

import pytest

from folders import save_model
from surefoot.plugins.migrate.run_files import place_model
from surefoot.use._model_location import locate

GOLDEN = Path(__file__).parents[2] / "golden" / "checkpoints" / "0.1.0" / "full"


@pytest.fixture
def run(tmp_path):
    """A run's folder with a checkpoint of a whole model, as far as a copy of it goes."""
    save_model(tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-4" / "optimizer.safetensors").write_bytes(b"moments")
    (tmp_path / "checkpoint-4" / "manifest.json").write_text("{}")
    return tmp_path


def test_the_model_takes_no_space_and_its_settings_may_be_edited(run):
    for _ in range(2):  # again, over what is there
        place_model(run / "checkpoint-4", run)
    weights = [folder / "model.safetensors" for folder in (run, run / "checkpoint-4")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    placed = {path.name for path in run.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= placed
    assert not {"optimizer.safetensors", "manifest.json"} & placed
    assert not [name for name in placed if name.endswith(".part")]
    assert not (run / "config.json").samefile(run / "checkpoint-4" / "config.json")


def test_a_folder_with_checkpoints_is_the_run_whatever_else_is_in_it(run, tmp_path):
    place_model(run / "checkpoint-4", run)
    assert locate(run).folder == run, "without a recipe it is a model's folder"
    of_a_run = tmp_path / "a run"
    shutil.copytree(GOLDEN, of_a_run / "checkpoint-2")
    shutil.copy(GOLDEN / "recipe.yaml", of_a_run)
    place_model(of_a_run / "checkpoint-2", of_a_run)
    assert (of_a_run / "model.safetensors").exists()
    found = locate(of_a_run)
    assert (found.folder, found.is_chosen) == (of_a_run / "checkpoint-2", True)
