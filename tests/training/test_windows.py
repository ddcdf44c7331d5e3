"""Windows of several optimizer steps: which examples each has, kept and resumed; killed inside."""

import os
import signal

import numpy as np
import pytest
import torch

import surefoot
from project import Project, assert_same, checkpoints, final_weights, in_child, losses, metrics
from stage_data import DATASETS, REWARD, written
from surefoot.checkpoint.reading.loading import load
from surefoot.checkpoint.saving.preparation import save
from surefoot.errors import RunError
from surefoot.training import TrainerCallback
from surefoot.training.windows import WindowState, inner_steps


@pytest.mark.parametrize(("passes", "mini_batches"), [(1, 1), (1, 3), (2, 2), (3, 4)])
def test_every_pass_trains_on_each_example_once(passes, mini_batches):
    steps = inner_steps(10, passes, mini_batches, seed=3)
    assert len(steps) == passes * mini_batches
    for number in range(passes):
        part = steps[number * mini_batches : (number + 1) * mini_batches]
        assert sorted(np.concatenate(part)) == list(range(10))
        assert max(map(len, part)) - min(map(len, part)) <= 1
    again = inner_steps(10, passes, mini_batches, seed=3)
    assert all(np.array_equal(a, b) for a, b in zip(steps, again, strict=True))


def test_passes_and_windows_have_orders_of_their_own():
    first, second, *_ = inner_steps(50, 2, 1, seed=1)
    assert not np.array_equal(first, second) or len(first) == 50
    parts = [inner_steps(50, 1, 2, seed=seed)[0].tolist() for seed in (1, 2)]
    assert parts[0] != parts[1]


def test_a_window_is_kept_with_columns_of_any_type(tmp_path):
    inside = WindowState((2, 7), done=3)
    inside.examples = [
        {
            "input_ids": [1, 2, 3],
            "old": torch.tensor([0.25, -1e-30]),
            "row": np.array([200], np.uint8),
        },
        {"input_ids": [4], "old": torch.tensor([-1.5]), "row": np.array([1, 2], np.uint8)},
    ]
    save(tmp_path, 1, {"inside": inside})
    found = WindowState()
    load(tmp_path / "checkpoint-1", {"inside": found})
    assert (found.place, found.done) == ((2, 7), 3)
    for ours, theirs in zip(found.examples, inside.examples, strict=True):
        for name, values in theirs.items():
            assert ours[name].tolist() == np.asarray(values).tolist()
    found.load_state_dict({})
    assert not found.examples


class Kill(TrainerCallback):
    def on_step_end(self, args, state, control):
        if state.global_step == 7:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("stage", ["kto", "grpo"])
def test_a_run_killed_inside_a_window_is_resumed_to_the_same_bits(stage, tmp_path):
    """Of grpo a window is 4 steps, and what was sampled is not sampled again."""
    data = {"datasets": [DATASETS.get(stage, "sums")], "cache_dir": str(tmp_path / "cache")}
    made = Project(
        tmp_path,
        stage=written(stage) if stage == "grpo" else stage,
        data=data,
        train={"max_steps": 10},
        checkpoint={"save_steps": 6, "async_save": False},
    )
    surefoot.train(made.recipe)
    options = {"train.output_dir": str(tmp_path / "cut")}
    assert in_child(lambda: surefoot.train(made.recipe, callbacks=[Kill()], **options))
    assert [path.name for path in checkpoints(tmp_path / "cut")] == ["checkpoint-6"]
    surefoot.train(made.recipe, **options)
    assert losses(tmp_path / "cut") == losses(made.run)
    assert_same(final_weights(tmp_path / "cut"), final_weights(made.run))
    figures = [[r.get("reward"), r.get("kl")] for r in metrics(made.run)]
    assert [[r.get("reward"), r.get("kl")] for r in metrics(tmp_path / "cut")] == figures


def test_a_run_killed_inside_a_reward_is_resumed_to_the_same_bits(tmp_path, monkeypatch):
    """The reward is computed in a process of its own, which ends with the run."""
    settings = {**written("grpo")["grpo"], "reward": f"{REWARD}:deadly", "mini_batches": 1}
    made = Project(
        tmp_path,
        stage={"grpo": settings},
        train={"max_steps": 4},
        checkpoint={"save_steps": 2, "async_save": False},
    )
    surefoot.train(made.recipe)
    options, armed = {"train.output_dir": str(tmp_path / "cut")}, tmp_path / "armed"
    monkeypatch.setenv("DEADLY_REWARD", str(armed))
    armed.touch()
    assert in_child(lambda: surefoot.train(made.recipe, **options))
    assert [path.name for path in checkpoints(tmp_path / "cut")][-1] == "checkpoint-2"
    surefoot.train(made.recipe, **options)
    assert losses(tmp_path / "cut") == losses(made.run)
    assert_same(final_weights(tmp_path / "cut"), final_weights(made.run))


def test_steps_of_windows_fill_an_epoch(tmp_path):
    made = Project(tmp_path, stage=written("grpo"), train={"max_steps": None, "num_epochs": 0.5})
    state = surefoot.train(made.recipe).state
    assert state.max_steps == 0.5 * 6 * 4  # 24 prompts, 4 a window, 4 steps each


def test_rewards_that_tell_nothing_apart_end_the_run(tmp_path):
    flat = {"grpo": {**written("grpo")["grpo"], "reward": f"{REWARD}:flat"}}
    made = Project(tmp_path, stage=flat, train={"max_steps": 10})
    with pytest.raises(RunError, match=r"nothing to train on in 7 windows .* flat_groups 1"):
        surefoot.train(made.recipe)
