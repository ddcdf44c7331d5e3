"""Processes that share the layers out learn what one process learns that has all of them."""

from functools import partial

import numpy as np
import pytest
import torch

import ranks
import spread
from kept import everything
from spread import UNEVEN, learn, trainer
from surefoot.checkpoint.loading import load
from surefoot.methods import Freeze, LoRA
from surefoot.model.numerics import seed_everything
from surefoot.parallel.world import ALONE

STEPS = 3
compare = partial(spread.compare, steps=STEPS)
ADAPTER = LoRA(rank=2, alpha=8.0)
FREEZE = Freeze(num_layers=1, modules=("mlp",))  # nothing learns in the first stage
ONES = {"micro_batch_size": 1}  # six micro-batches, of as many lengths


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"kind": "llama", **UNEVEN}, marks=pytest.mark.proof),
        {"kind": "qwen2", **UNEVEN},  # tied, with biases
        pytest.param(
            {"kind": "gemma2", "packing": True}, marks=pytest.mark.proof
        ),  # scaled embeddings, capped logits, sliding windows
        pytest.param({"kind": "mistral"}, marks=pytest.mark.proof),
    ],
    ids=lambda changes: changes["kind"] + " packed" * changes.get("packing", False),
)
def test_two_share_the_layers(changes, tmp_path):
    compare(2, tmp_path, parallel={"pp": 2}, train=ONES, **changes)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(FREEZE, marks=pytest.mark.proof),
        pytest.param(
            Freeze(num_layers=1, modules=("mlp",), extra_modules=("embed_tokens",)),
            marks=pytest.mark.proof,
        ),
        LoRA(rank=2, modules_to_save=("lm_head", "embed_tokens")),
    ],
    ids=["freeze", "freeze but embeddings", "lora with embeddings and head"],
)
def test_frozen_weights_and_adapters_are_shared_out_as_well(method, tmp_path):
    compare(2, tmp_path, parallel={"pp": 2}, method=method, train=ONES, **UNEVEN)


@pytest.mark.parametrize(
    "method", [pytest.param(FREEZE, marks=pytest.mark.proof), ADAPTER], ids=["freeze", "lora"]
)
def test_packed_rows_with_recomputed_activations(method, tmp_path):
    changes = {"method": method, "packing": True, "recompute": True, "train": ONES}
    compare(2, tmp_path, parallel={"pp": 2}, **changes)


@pytest.mark.parametrize(
    "parallel",
    [
        *(
            pytest.param(parallel, marks=pytest.mark.proof)
            for parallel in ({"pp": 2, "dp_shard": 2}, {"pp": 2, "dp_replicate": 2}, {"pp": 4})
        ),
        {"pp": 2, "tp": 2},
        pytest.param(
            {"pp": 2, "dp_shard": 2, "pp_schedule": "interleaved"}, marks=pytest.mark.proof
        ),
    ],
    ids=str,
)
def test_four_share_layers_and_more(parallel, tmp_path):
    changes = {"kind": "qwen2", "num_hidden_layers": 5, "train": ONES, **UNEVEN}
    compare(4, tmp_path, parallel=parallel, **changes)


@pytest.mark.parametrize(
    ("schedule", "size"),
    [
        pytest.param("gpipe", 1, marks=pytest.mark.proof),
        ("interleaved", 6),
        pytest.param("gpipe", 6, marks=pytest.mark.proof),
        pytest.param("interleaved", 1, marks=pytest.mark.proof),
    ],
)
def test_each_schedule_with_few_and_many_micro_batches(schedule, size, tmp_path):
    changes = {"num_hidden_layers": 4, "train": {"micro_batch_size": size}}
    compare(2, tmp_path, parallel={"pp": 2, "pp_schedule": schedule}, **changes)


def learnt(world, folder, changes):
    made = trainer(world, folder, **changes)
    return learn(made, STEPS), everything(made)


def compare_exactly(count, folder, *, parallel, **changes):
    """Losses, norms, weights and moments, in float64, where noise is not blown up by Adam."""
    changes |= {"dtype": torch.float64}
    losses, expected = learnt(ALONE, folder, changes)
    changes["parallel"] = parallel
    found = ranks.run(count, lambda w: learnt(w, folder, changes), timeout=300, **parallel)
    for ours, _ in found:
        assert np.allclose(ours, losses, rtol=1e-10, atol=1e-10)
    parts = [part for _, part in found]
    assert set().union(*parts) == expected.keys()
    for part in parts:
        for name, tensor in part.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.proof
def test_in_float64_only_rounding_is_left(tmp_path):
    changes = {"kind": "qwen2", "train": ONES, **UNEVEN}
    compare_exactly(4, tmp_path, parallel={"pp": 2, "tp": 2}, **changes)


@pytest.mark.proof
def test_in_bfloat16_the_sums_are_rounded(tmp_path):
    train = {"precision": "bf16", **ONES}
    compare(2, tmp_path, parallel={"pp": 2}, close=5e-3, train=train, **UNEVEN)


def dropped(world, folder):
    """The masks that the layers of this rank would draw for the first micro-batch."""
    parallel = {"pp_schedule": "interleaved"}
    made = trainer(world, folder, train=ONES, num_hidden_layers=4, parallel=parallel)
    found = []
    made.policy.step.gradients(
        made.windows.loader.next_window(),
        partial(made.stage.loss, "policy"),
        step=0,
        before=lambda index: found.append((seed_everything(0, index, *world.draws), torch.rand(1))),
        after=lambda index: None,
    )
    return [float(number) for _, number in found]


def test_layers_and_micro_batches_draw_numbers_of_their_own(tmp_path):
    found = ranks.run(2, lambda w: dropped(w, tmp_path), pp=2)
    numbers = [number for one in found for number in one]
    assert len(numbers) == len(set(numbers)) == 2 * 2 * 6


def test_more_stages_than_layers_are_refused_in_one_sentence(tmp_path):
    parallel = {"pp_schedule": "interleaved"}
    with pytest.raises(
        AssertionError, match=r"RecipeError: parallel\.pp: 4 pipeline stages need as many"
    ):
        ranks.run(2, lambda w: trainer(w, tmp_path, parallel=parallel), pp=2)


def test_one_rank_alone_reads_the_weights_of_a_checkpoint(tmp_path):
    """At the end of a run the first one loads the best weights; the others are elsewhere."""

    def restored(world):
        made = trainer(world, tmp_path, parallel={"pp": 2}, train=ONES)
        made.saver.save(made.state.global_step, made.states)
        made.saver.wait()
        made.saver.close()
        if world.is_main:
            load(made.saver.path_of(0), made.states, only=["model"])
        return world.rank

    assert ranks.run(2, restored, timeout=30, pp=2) == [0, 1]
