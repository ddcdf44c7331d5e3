"""Windows of several optimizer steps: which examples each has, kept and resumed; killed inside."""

import os
import signal

import numpy as np
import pytest
import torch

import surefoot
from project import Project, assert_same, checkpoints, final_weights, in_child, losses, metrics
from stage_data import DATASETS, REWARD, SETTINGS, written
from surefoot.checkpoint.loading import load
from surefoot.checkpoint.saving.preparation import save
from surefoot.errors import RunError
from surefoot.generate.responses import Chooser
from surefoot.recipe.recipe import load as load_recipe
from surefoot.run.assembly import build
from surefoot.training import TrainerCallback
from surefoot.training.windows import WindowState, inner_steps

LONGEST = 5  # tokens of a response


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


@pytest.mark.proof
@pytest.mark.parametrize(
    "stage",
    ["ppo", *(pytest.param(s, marks=pytest.mark.proof) for s in ("kto", "grpo", "distill"))],
)
def test_a_run_killed_inside_a_window_is_resumed_to_the_same_bits(stage, tmp_path):
    """Of grpo and ppo a window is 4 steps, and what was sampled is not sampled again; ppo keeps its
    coefficient and the moments of all scores from window to window."""
    data = {"datasets": [DATASETS.get(stage, "sums")], "cache_dir": str(tmp_path / "cache")}
    made = Project(
        tmp_path,
        stage=written(stage) if stage in SETTINGS else stage,
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
    names = ("reward", "kl", "kl_coefficient", "explained_variance")
    whole, cut = (
        [[row.get(name) for name in names] for row in metrics(run)]
        for run in (made.run, tmp_path / "cut")
    )
    assert cut == whole
    if stage == "ppo":
        assert len({row[2] for row in whole} - {None}) == 3


class KillBetweenBatches(TrainerCallback):
    def on_substep_end(self, args, state, control):
        if state.global_step == 4:  # in the second pass of a window
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def rewarded(tmp_path_factory):
    """A run of two windows of each stage, never interrupted."""
    found = {}
    for stage in ("grpo", "ppo"):
        settings = {**written(stage)[stage], "reward": f"{REWARD}:deadly", "passes": 5}
        found[stage] = Project(
            tmp_path_factory.mktemp(stage),
            stage={stage: {**settings, "mini_batches": 1}},
            train={"max_steps": 7, "micro_batch_size": 1},
            checkpoint={"save_steps": 3, "async_save": False},
        )
        surefoot.train(found[stage].recipe)
    return found


def die_between_tokens(patch):
    """Be killed after 3 tokens of each response of the second window."""
    calls, advance = [0], Chooser.advance

    def deadly(self, logits, rows):
        calls[0] += 1
        if calls[0] == LONGEST + 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return advance(self, logits, rows)

    patch.setattr(Chooser, "advance", deadly)


@pytest.mark.parametrize(
    ("stage", "where"),
    [
        ("grpo", "sampling"),
        pytest.param("grpo", "a reward", marks=pytest.mark.proof),
        ("ppo", "a step of an inner epoch"),
        pytest.param("ppo", "sampling", marks=pytest.mark.proof),
        pytest.param("ppo", "a reward", marks=pytest.mark.proof),
        pytest.param("grpo", "a step of an inner epoch", marks=pytest.mark.proof),
    ],
)
def test_a_run_killed_within_is_resumed_to_the_same_bits(
    stage, where, rewarded, tmp_path, monkeypatch
):
    """Of a reward the process is another one, which ends with the run."""
    made, cut, armed = rewarded[stage], tmp_path / "cut", tmp_path / "armed"
    options = {"train.output_dir": str(cut)}
    members = [KillBetweenBatches()] if where.startswith("a step") else []
    if where == "a reward":
        monkeypatch.setenv("DEADLY_REWARD", str(armed))
        armed.touch()
    with monkeypatch.context() as patch:
        if where == "sampling":
            die_between_tokens(patch)
        code = in_child(lambda: surefoot.train(made.recipe, callbacks=members, **options))
    assert code == -signal.SIGKILL
    assert [path.name for path in checkpoints(cut)] == ["checkpoint-3"]
    known = max(losses(cut))
    assert known == (4 if where.startswith("a step") else 5)
    surefoot.train(made.recipe, **options)
    assert losses(cut) == losses(made.run)
    assert_same(final_weights(cut), final_weights(made.run))


def test_steps_of_windows_fill_an_epoch(tmp_path):
    made = Project(tmp_path, stage=written("grpo"), train={"max_steps": None, "num_epochs": 0.5})
    state = build(load_recipe(made.recipe)).state
    assert state.max_steps == 0.5 * 6 * 4  # 24 prompts, 4 a window, 4 steps each


def test_rewards_that_tell_nothing_apart_end_the_run(tmp_path):
    flat = {"grpo": {**written("grpo")["grpo"], "reward": f"{REWARD}:flat"}}
    made = Project(tmp_path, stage=flat, train={"max_steps": 10})
    with pytest.raises(RunError, match=r"nothing to train on in 7 windows .* flat_groups 1"):
        surefoot.train(made.recipe)
