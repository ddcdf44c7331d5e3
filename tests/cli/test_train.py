"""How ``surefoot train`` ends: what it says, and with which exit code."""

import json
import shlex

import pytest

from commands import refused, run
from project import Project, start, surefoot
from surefoot import train


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run with an evaluation, to its end."""
    folder = tmp_path_factory.mktemp("a run")
    project = Project(folder, data={"val_size": 4}, train={"max_steps": 3, "eval_steps": 2})
    code, _, err = surefoot("train", project.recipe)
    assert code == 0, err
    return project, err


def test_the_end_says_how_long_where_the_best_step_and_what_to_type_next(ended):
    project, err = ended
    results = json.loads((project.run / "all_results.json").read_text())
    assert "trained: 3 steps in 0:0" in err
    assert f"best: step {results['best_global_step']}, eval_loss" in err
    assert f"{project.run}: checkpoint-3, metrics.jsonl, loss.png, all_results.json" in err
    assert f"next: surefoot chat {shlex.quote(str(project.run))}" in err


def test_the_end_has_tables_of_the_metrics_of_training_and_of_the_last_evaluation(ended):
    project, err = ended
    results = json.loads((project.run / "all_results.json").read_text())
    table = err[err.index("train metrics:") : err.index("next: ")]
    train, evaluation = table.split("eval metrics:")
    shown = [
        dict(line.split() for line in part.splitlines() if line[:2] == "  ")
        for part in (train, evaluation)
    ]
    assert shown[0]["train_loss"] == f"{results['train_loss']:.5g}"
    assert shown[0]["num_input_tokens_seen"] == f"{results['num_input_tokens_seen']:,}"
    assert shown[1]["eval_loss"] == f"{results['eval_loss']:.5g}"
    assert shown[1].keys() == {name for name in results if name.startswith("eval_")}


def test_the_start_shows_one_example_and_what_of_it_is_trained_on(ended):
    (line,) = [line for line in ended[1].splitlines() if line.startswith("training example: ")]
    assert " in [[ ]]: <|im_start|>user\\nWhat is 0 plus 0?<|im_end|>\\n" in line
    assert "assistant\\n[[It is 0.<|im_end|>]]" in line


def test_an_example_of_a_pair_is_one_line_without_the_middle_of_long_texts(tmp_path, caplog):
    caplog.set_level("INFO")
    data = {"datasets": ["pairs"], "cutoff_len": 900}
    sections = {"model": {"path": "model", "max_positions": 1024}, "data": data}
    project = Project(tmp_path, stage="dpo", train={"max_steps": 1}, **sections)
    row = {"instruction": "a" * 500, "chosen": "Yes.", "rejected": "No."}
    (tmp_path / "data" / "pairs.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    train(project.recipe)
    (line,) = [m for m in caplog.messages if m.startswith("training example: ")]
    assert "a … a" in line and len(line) < 500
    assert " chosen: [[Yes.<|im_end|>]]" in line and " rejected: [[No.<|im_end|>]]" in line


def test_the_command_that_it_proposes_works(ended):
    err = ended[1]
    line = next(line for line in err.splitlines() if line.startswith("next: "))
    arguments = shlex.split(line.removeprefix("next: surefoot "))
    code, _, err = surefoot(*arguments, "--prompt", "What is 1 plus 2?", "--max-new-tokens", "2")
    assert code == 0, err


def test_a_run_that_skipped_steps_says_so_and_ends_with_3(tmp_path):
    project = Project(
        tmp_path,
        method="full",
        data={"packing": False},
        train={"max_steps": 6, "on_nan": "skip"},
        optim={"adamw": {"learning_rate": 1e30, "schedule": "constant"}},
    )
    for launch in range(2):  # the second one finds it complete
        done = run("train", project.recipe)
        assert done.exit_code == 3, done.output
        assert "5 steps or batches whose loss or gradient was NaN or infinite" in done.stderr
        assert done.stderr.count("the update is skipped") == (0 if launch else 5)
    again = ("train", project.recipe, f"train.output_dir={tmp_path / 'b'}")
    assert "raise train.max_skipped_steps" in refused(*again, "train.max_skipped_steps=2")


def test_two_ranks_speak_once(tmp_path):
    project = Project(tmp_path, train={"max_steps": 400, "log_steps": 10})
    process = start("train", project.recipe, "parallel.num_processes=2")
    for line in process.stderr:
        if "step=10/" in line:
            process.terminate()
            break
    _, err = process.communicate(timeout=100)
    assert process.returncode == 143, err
    assert err.count("saved; run the same command to resume") == 1


def test_what_the_number_of_ranks_does_not_divide_is_reported_before_they_start(tmp_path):
    project = Project(tmp_path)
    sizes = ["train.global_batch_size=4", "train.micro_batch_size=1"]
    code, _, err = surefoot("train", project.recipe, "parallel.num_processes=8", *sizes)
    assert code == 2
    assert err.startswith("error: train.global_batch_size (4) is not a multiple of")
    assert not project.run.exists()
