"""The files that scripts read of a run of LLaMA-Factory."""

import json
import shutil
from pathlib import Path

import pytest

from folders import save_model
from surefoot.plugins.migrate.run_files import LOG, TrainerLog, place_model, write_results
from surefoot.training.callback import TrainerControl, TrainerState
from surefoot.use._model_location import locate

GOLDEN = Path(__file__).parents[2] / "golden" / "checkpoints" / "0.1.0" / "full"


def write(path, steps, begun=0):
    """One launch that logs ``steps`` of 10, after ``begun`` steps."""
    callback, control = TrainerLog(path.parent), TrainerControl()
    callback.on_train_begin(None, TrainerState(global_step=begun), control)
    for step in steps:
        state = TrainerState(global_step=step, max_steps=10, num_input_tokens_seen=64 * step)
        logs = {"step": step, "loss": 1.0 / step, "learning_rate": 1e-4, "epoch": 0.5}
        callback.on_log(None, state, control, logs=logs)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_log_has_their_names_and_no_step_twice(tmp_path):
    (first, _, _) = write(tmp_path / LOG, [2, 4, 6])
    known = {"current_steps": 2, "total_steps": 10, "loss": 0.5, "lr": 1e-4, "epoch": 0.5}
    assert first == {
        **known,
        **{"percentage": 20.0, "elapsed_time": "0:00:00", "remaining_time": "0:00:00"},
        "total_tokens": 128,
    }
    with (tmp_path / LOG).open("a") as file:
        file.write('{"current_st')  # a crash
    resumed = write(tmp_path / LOG, [6, 8], begun=4)
    assert [line["current_steps"] for line in resumed] == [2, 4, 6, 8]


def test_results_are_those_of_their_file(tmp_path):
    (tmp_path / "loss.png").write_bytes(b"picture")
    state = TrainerState(global_step=8, epoch=2.0, train_loss_total=12.0, train_runtime=4.0)
    write_results(tmp_path, state, batch_size=16)
    assert json.loads((tmp_path / "train_results.json").read_text()) == {
        **{"epoch": 2.0, "total_flos": 0.0, "train_loss": 1.5, "train_runtime": 4.0},
        **{"train_samples_per_second": 32.0, "train_steps_per_second": 2.0},
    }
    assert (tmp_path / "training_loss.png").read_bytes() == b"picture"


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
