"""What people who come from LLaMA-Factory read of a run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import surefoot
from project import Project, metrics, model_folder, rows
from surefoot.plugins.migrate.run_metrics import TrainerLog, write_metrics
from surefoot.recipe.recipe import load
from surefoot.training.callback import TrainerState

SCRIPT = Path(__file__).with_name("reference_run.sh")


def test_the_command_of_the_reference_leaves_every_file_that_its_users_read(tmp_path):
    model_folder(tmp_path / "model", max_position_embeddings=2048)
    data = tmp_path / "data"
    data.mkdir()
    (data / "alpaca_zh.json").write_text(json.dumps(rows(24)))
    entry = {"file_name": "alpaca_zh.json"}
    (data / "dataset_info.json").write_text(json.dumps({"alpaca_zh": entry}))
    environment = {**os.environ, "SUREFOOT": f"{sys.executable} -m surefoot"}
    words = ["sh", SCRIPT, tmp_path / "model", data, tmp_path / "out"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "plot_loss" not in done.stderr.partition("without effect here:")[2].splitlines()[0]


def test_the_log_of_a_resumed_run_has_each_line_once(tmp_path):
    """Of a run that was killed after its second save, and whose disk lost the first line."""
    project = Project(tmp_path, train={"max_steps": 4}, checkpoint={"save_steps": 2})
    path = project.run / "trainer_log.jsonl"
    surefoot.train(project.recipe, callbacks=[TrainerLog(path)])
    before = path.read_text().splitlines()
    shutil.rmtree(project.run / "checkpoint-4")
    path.write_text("\n".join(before[1:]) + '\n{"current_st')
    surefoot.train(project.recipe, callbacks=[TrainerLog(path)])
    text = path.read_text().splitlines()
    lines = [json.loads(line) for line in text]
    assert text[1] == before[1]
    assert [line["percentage"] for line in lines] == [25.0, 50.0, 75.0, 100.0]
    logged = [(line["step"], line["loss"]) for line in metrics(project.run)]
    assert [(line["current_steps"], line["loss"]) for line in lines] == logged


def ended(project, **train):
    """The recipe and the state of a run of three steps, the second one the best."""
    (project.run).mkdir(exist_ok=True)
    (project.run / "all_results.json").write_text('{"train_loss": 1.0, "global_step": 3}')
    history = [{"step": n, "epoch": n / 3, "eval_loss": abs(n - 2.0)} for n in (1, 2, 3)]
    state = TrainerState(global_step=3, max_steps=3, log_history=history, best_global_step=2)
    return load(project.recipe, [f"train.{name}={value}" for name, value in train.items()]), state


def test_the_evaluation_is_that_of_the_model_in_the_folder(tmp_path):
    project = Project(tmp_path, data={"val_size": 4}, train={"eval_steps": 1})
    for options, expected in (({}, 1.0), ({"load_best_model_at_end": "true"}, 0.0)):
        write_metrics(*ended(project, **options), ())
        found = json.loads((project.run / "eval_results.json").read_text())
        assert found["eval_loss"] == expected
    assert json.loads((project.run / "train_results.json").read_text()) == {"train_loss": 1.0}
    assert not list(project.run.glob("*.png"))
