"""Every process evaluates its share; together they find what one process finds."""

import os
import signal
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ranks
import small
from each import some
from spread import trainer
from surefoot.batch import IGNORE_INDEX
from surefoot.data.order.micro_batches import Collation, in_turn
from surefoot.data.text.collation import collate
from surefoot.methods import LoRA
from surefoot.parallel.world import ALONE
from surefoot.stages import SFT
from surefoot.training.callback import TrainerCallback
from surefoot.training.evaluation import EvaluationSet
from surefoot.training.precompute import NOTHING


@given(count=st.integers(1, 14), size=st.integers(1, 5), world_size=st.integers(1, 4), packing=...)
def test_the_shares_are_the_batches_of_one_process_dealt_out(
    count: int, size: int, world_size: int, packing: bool
):
    def share(rank, world_size):
        laid = Collation(collate, packing)
        groups = in_turn(count, size, rank, world_size)
        return [laid.batch_of(group, small.examples(count)) for group in groups]

    whole = share(0, 1)
    shares = [share(rank, world_size) for rank in range(world_size)]
    assert {len(one) for one in shares} == {-(-len(whole) // world_size)}
    dealt = [batch for turn in zip(*shares, strict=True) for batch in turn]
    for found, expected in zip(dealt, whole, strict=False):
        assert torch.equal(found.input_ids, expected.input_ids)
        assert torch.equal(found.labels, expected.labels)
    for more in dealt[len(whole) :]:
        assert (more.labels == IGNORE_INDEX).all()


def evals(count):
    return EvaluationSet(small.examples(count, seed=9), NOTHING)


def measured(world, folder, count, **changes):
    made = trainer(world, folder, **changes)
    return made.predict(evals(count))


@pytest.mark.parametrize(
    ("processes", "parallel", "changes"),
    [
        (2, {}, {}),
        pytest.param(
            2, {"dp_replicate": 2}, {"method": LoRA(rank=2, dropout=0.3)}, marks=pytest.mark.proof
        ),
        pytest.param(2, {"tp": 2}, {}, marks=pytest.mark.proof),
        pytest.param(
            2, {"tp": 2}, {"stage": SFT(label_smoothing_factor=0.2)}, marks=pytest.mark.proof
        ),
        (2, {"pp": 2}, {"stage": SFT(label_smoothing_factor=0.2)}),
        pytest.param(3, {}, {"train": {"micro_batch_size": 1}}, marks=pytest.mark.proof),
        pytest.param(4, {"tp": 2}, {}, marks=pytest.mark.proof),
    ],
    ids=str,
)
@pytest.mark.parametrize("count", some([9, 1], [9]))
def test_metrics_are_those_of_one_process(processes, parallel, changes, count, tmp_path):
    expected = measured(ALONE, tmp_path, count, **changes)
    found = ranks.run(processes, lambda w: measured(w, tmp_path, count, **changes), **parallel)
    assert all(one == found[0] for one in found), "all ranks must say the same"
    assert found[0] == pytest.approx(expected, rel=1e-5)
    assert found[0]["predict_token_accuracy"] == expected["predict_token_accuracy"]


def test_the_perplexity_is_of_the_labels_and_not_of_smoothed_ones(tmp_path):
    plain, smoothed = (
        measured(ALONE, tmp_path, 5, stage=SFT(label_smoothing_factor=factor))
        for factor in (0, 0.3)
    )
    assert smoothed["predict_nll"] == pytest.approx(plain["predict_loss"])
    assert smoothed["predict_perplexity"] == pytest.approx(plain["predict_perplexity"])
    assert smoothed["predict_loss"] != pytest.approx(plain["predict_loss"], rel=1e-3)
    assert "predict_nll" not in plain


class Signal(TrainerCallback):
    """Sends SIGTERM to one rank while it evaluates, and counts the batches."""

    def __init__(self, world):
        self.world, self.count = world, 0

    def on_prediction_step(self, args, state, control):
        self.count += 1
        if self.count == 2 and self.world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_step_end(self, args, state, control):
        control.should_evaluate |= state.global_step == 2


def broken_off(world, folder):
    made = replace(trainer(world, folder), evals={"": evals(14)})
    made.callbacks.add(watch := Signal(world))
    state = made.fit()
    return watch.count, state.global_step, state.pending, made.signal, made.saver.newest


def test_a_signal_to_one_of_two_breaks_the_evaluation_off_in_both(tmp_path):
    saved = tmp_path / "checkpoint-2"
    found = ranks.run(2, lambda world: broken_off(world, tmp_path))
    assert found == [(2, 2, ["should_evaluate"], signal.SIGTERM, saved)] * 2
