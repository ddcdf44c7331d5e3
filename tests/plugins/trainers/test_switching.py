"""Half a run here and half there is the whole run of either: the independent check is the Trainer.

Batches, order and precision are the same, nothing is random. Only the order of float32 additions
differs (they pad and average where we pack and sum), so the bound is that of rounding: the weights
are below 1 in size, and Adam's step is 0.003 at most.
"""

from dataclasses import replace

import pytest
import torch
from theirs import HALF, Losses, furthest, their_trainer, weights_of

from surefoot.plugins.trainers.from_trainer import load_trainer_checkpoint
from surefoot.plugins.trainers.to_trainer import save_trainer_checkpoint
from surefoot.run.training_run import build

ROUNDING = 2e-6


def elsewhere(recipe, folder):
    return replace(recipe, train=replace(recipe.train, output_dir=folder))


def save(trainer):
    with trainer.saver:
        trainer.save()
        (path,) = trainer.saver.wait()
    return path


def test_a_run_that_began_in_the_trainer_ends_as_if_it_had_never_left(both, tmp_path):
    ours = build(elsewhere(both.recipe, tmp_path))
    load_trainer_checkpoint(both.theirs, ours, trust_pickle=True)
    assert ours.state.global_step == HALF
    ours.fit()
    assert furthest(weights_of(ours.policy.module), both.their_weights) < ROUNDING
    losses = {r["step"]: r["loss"] for r in ours.state.log_history}
    assert list(losses) == list(range(1, 2 * HALF + 1)), "the log goes on"
    assert losses == pytest.approx(both.their_losses, abs=ROUNDING)


def test_a_run_that_went_over_to_the_trainer_ends_as_if_it_had_stayed(both, tmp_path):
    save_trainer_checkpoint(both.ours, tmp_path / "over", run=both.recipe, base=both.base)
    losses = Losses()
    theirs = their_trainer(both.recipe, tmp_path / "theirs", losses, model=both.start())
    theirs.train(resume_from_checkpoint=str(tmp_path / "over"))
    assert theirs.state.global_step == 2 * HALF
    assert furthest(weights_of(theirs.model), both.our_weights) < ROUNDING
    assert losses.of == pytest.approx(
        {step: loss for step, loss in both.our_losses.items() if step > HALF}, abs=ROUNDING
    )
    assert [r["step"] for r in theirs.state.log_history if "loss" in r] == list(range(1, 9))
    assert (tmp_path / "theirs" / "checkpoint-8" / "trainer_state.json").exists(), "it could save"


def test_moments_and_position_come_over_and_go_back_to_the_bit(both, tmp_path):
    ours = build(elsewhere(both.recipe, tmp_path / "ours"))
    load_trainer_checkpoint(both.theirs, ours, trust_pickle=True)
    save_trainer_checkpoint(save(ours), tmp_path / "back", run=both.recipe, base=both.base)

    def read(name):
        folders = (both.theirs, tmp_path / "back")
        return [torch.load(folder / name, weights_only=True) for folder in folders]

    there, back = read("optimizer.pt")
    assert there["state"].keys() == back["state"].keys()
    for number, values in there["state"].items():
        assert values.keys() == back["state"][number].keys()
        for name, tensor in values.items():
            assert torch.equal(tensor, back["state"][number][name]), (number, name)
    for was, now in zip(there["param_groups"], back["param_groups"], strict=True):
        assert now == {**was, "lr": pytest.approx(was["lr"])}
    there, back = read("scheduler.pt")
    assert back.keys() == there.keys()
    assert back["_last_lr"] == pytest.approx(there["_last_lr"])
    assert (back["last_epoch"], back["base_lrs"]) == (there["last_epoch"], there["base_lrs"])
