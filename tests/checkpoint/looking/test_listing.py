"""What checkpoints say of themselves, damaged ones and other people's included."""

import json
import os
import re

import pytest
import torch
from safetensors.torch import save_file

from damage import flip
from surefoot.checkpoint.disk.commit import temporary_folder
from surefoot.checkpoint.looking.listing import list_run, verified
from surefoot.checkpoint.saving.preparation import save

from ..sample import sample_states


def trainer_state(loss, best=None):
    state = {
        "log_history": [{"loss": 9.0}, {"loss": loss}, {"step": 10, "eval_loss": 1.0}],
        "best_global_step": best,
    }
    return {"trainer_state.json": json.dumps(state).encode()}


def test_a_run_is_listed_oldest_first_with_what_is_wrong_last(tmp_path):
    for step, loss in ((5, 2.0), (10, 1.5), (100, 1.25)):
        save(tmp_path, step, sample_states(), companions=trainer_state(loss, best=10))
    (tmp_path / "checkpoint-200").mkdir()
    (tmp_path / ".checkpoint-300.0a.part").mkdir()
    (tmp_path / "checkpoint-100" / "state.json").write_text("{}")
    lines = list_run(tmp_path)
    assert [line.path.name for line in lines] == [
        "checkpoint-5", "checkpoint-10", "checkpoint-100", "checkpoint-200",
        ".checkpoint-300.0a.part",
    ]  # fmt: skip
    assert [line.step for line in lines] == [5, 10, 100, 200, None]
    assert [line.loss for line in lines] == [2.0, 1.5, 1.25, None, None]
    assert [line.eval_loss for line in lines] == [None, 1.0, None, None, None]
    assert [line.is_best for line in lines] == [False, True, False, False, False]
    assert [line.problem is None for line in lines] == [True, True, False, False, False]
    assert lines[2].problem.startswith("state.json: 2 of ")
    assert lines[3].problem == "this checkpoint was never committed: it has no manifest.json"
    files = (tmp_path / "checkpoint-5").iterdir()
    assert lines[0].num_bytes == sum(p.stat().st_size for p in files if p.name != "manifest.json")
    assert lines[0].kind == "full" and lines[0].created.endswith("Z")


def test_a_save_in_progress_is_no_leftover(tmp_path):
    with temporary_folder(tmp_path / "checkpoint-5") as part:
        (line,) = list_run(tmp_path)
        assert line.path == part.folder and line.is_being_written and line.problem is None
        part.commit(tmp_path / "checkpoint-5", b"{}")  # looking on has not disturbed it
    (line,) = list_run(tmp_path)
    assert not line.is_being_written


def test_a_missing_file_and_a_damaged_manifest_are_told(tmp_path):
    one, two = (save(tmp_path, step, sample_states()) for step in (1, 2))
    (one / "model.safetensors").unlink()
    (two / "manifest.json").write_bytes((two / "manifest.json").read_bytes()[:-9])
    problems = [line.problem for line in list_run(tmp_path)]
    assert problems[0] == "model.safetensors: missing"
    assert "not valid JSON" in problems[1]


@pytest.mark.parametrize(
    "text", [b"{", b"[]", b'{"log_history": 1}', b'{"log_history": [{"loss": "x"}, 3]}', b"{}"]
)
def test_a_strange_trainer_state_is_no_problem(tmp_path, text):
    save(tmp_path, 1, sample_states(), companions={"trainer_state.json": text})
    (line,) = list_run(tmp_path)
    assert (line.loss, line.is_best, line.problem) == (None, False, None)


def test_a_checkpoint_is_a_list_of_itself(tmp_path):
    folder = save(tmp_path, 1, sample_states(), kind="adapter")
    (line,) = list_run(folder)
    assert line.path == folder and line.kind == "adapter"
    assert list_run(tmp_path / "checkpoint-1" / "..") != []


def trainers(root, step, **tensors):
    """A checkpoint as the Hugging Face Trainer writes it."""
    folder = root / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    save_file(tensors or {"a": torch.ones(3)}, folder / "model.safetensors")
    (folder / "optimizer.pt").write_bytes(b"pickle")
    state = {
        "global_step": step,
        "best_global_step": 2,
        "log_history": [{"step": step, "loss": 0.5}, {"step": step, "eval_loss": float("nan")}],
    }
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


def test_the_trainers_checkpoints_are_listed(tmp_path):
    for step in (2, 10):
        folder = trainers(tmp_path, step)
    os.utime(folder / "trainer_state.json", (5, 5))
    one, two = list_run(tmp_path)
    assert (one.step, one.layout, one.kind, one.loss) == (2, "huggingface", "full", 0.5)
    assert one.eval_loss != one.eval_loss and one.is_best and not two.is_best
    assert two.created == "1970-01-01T00:00:05Z"
    assert two.num_bytes == sum(path.stat().st_size for path in folder.iterdir())
    (folder / "trainer_state.json").write_text("{")  # a log is no reason not to use the weights
    line = list_run(tmp_path)[1]
    assert (line.step, line.loss, line.problem) == (10, None, None)


def test_an_adapter_of_the_trainers(tmp_path):
    folder = trainers(tmp_path, 3)
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (line,) = list_run(tmp_path)
    assert (line.layout, line.kind) == ("peft", "adapter")


def test_pickled_weights_are_a_problem(tmp_path):
    folder = trainers(tmp_path, 3)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    (line,) = list_run(tmp_path)
    assert line.step == 3 and "pickled file can run code" in line.problem
    assert not line.problem.startswith("/")


def test_verified_says_how_thoroughly(tmp_path):
    ours = save(tmp_path, 1, sample_states())
    theirs = trainers(tmp_path, 2)
    seen = []
    assert [verified(line, seen.append).verified for line in list_run(tmp_path)] == [
        "every byte",
        "structure",
    ]
    assert sum(seen) > 0
    flip(ours / "optimizer.safetensors")
    (theirs / "config.json").write_text("{")
    lines = [verified(line) for line in list_run(tmp_path)]
    assert [line.verified for line in lines] == [None, None]
    assert re.match(
        r"optimizer\.safetensors: '[\w.]+' has changed since it was saved \(hash ", lines[0].problem
    )
    assert verified(lines[0]) == lines[0]


def test_shared_files_count_for_the_oldest(tmp_path):
    one, two = (save(tmp_path, step, sample_states()) for step in (1, 2))
    (two / "model.safetensors").unlink()
    os.link(one / "model.safetensors", two / "model.safetensors")
    lines = list_run(tmp_path)
    assert lines[0].num_bytes == lines[1].num_bytes
    blocks = (one / "model.safetensors").stat().st_blocks * 512
    whole = sum(path.stat().st_blocks * 512 for path in two.iterdir())
    assert lines[1].disk_bytes == whole - blocks


def test_the_parent_is_told(tmp_path):
    save(tmp_path, 2, sample_states(), parent="checkpoint-1")
    assert list_run(tmp_path)[0].parent == "checkpoint-1"
