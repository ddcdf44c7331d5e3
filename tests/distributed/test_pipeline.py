"""Processes that share the layers out learn what one process learns that has all of them."""

import pytest
import torch

import ranks
from spread import UNEVEN, learn, trainer
from surefoot.methods.freeze import Freeze
from surefoot.methods.lora import LoRA
from surefoot.parallel.world import ALONE

CLOSE = 1e-5  # of mean losses (about 4) and of gradient norms: float32 sums in another order
STEPS = 3
ADAPTER = LoRA(rank=2, alpha=8.0)
ONES = {"micro_batch_size": 1}  # six micro-batches, of as many lengths


def compare(count, folder, *, close=CLOSE, parallel, **changes):
    expected = learn(trainer(ALONE, folder, **changes), STEPS)
    found = ranks.run(count, lambda w: learn(trainer(w, folder, **changes), STEPS), **parallel)
    assert all(one == found[0] for one in found), "all ranks must say the same"
    for step, (ours, theirs) in enumerate(zip(found[0], expected, strict=True)):
        assert ours == pytest.approx(theirs, abs=close, rel=close), f"step {step}"


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "llama", **UNEVEN},
        {"kind": "qwen2", **UNEVEN},  # tied, with biases
        {"kind": "qwen3"},
        {"kind": "gemma2", "packing": True},  # scaled embeddings, capped logits, sliding windows
        {"kind": "gemma2"},
        {"kind": "phi3"},
        {"kind": "mistral", "packing": True},
        {"kind": "olmo2", "pad_token_id": 63},
    ],
    ids=lambda changes: changes["kind"] + " packed" * changes.get("packing", False),
)
def test_two_share_the_layers(changes, tmp_path):
    compare(2, tmp_path, parallel={"pp": 2}, train=ONES, **changes)


@pytest.mark.parametrize(
    "method",
    [
        Freeze(num_layers=1, modules=("mlp",)),  # nothing learns in the first stage
        Freeze(num_layers=1, modules=("mlp",), extra_modules=("embed_tokens",)),
        ADAPTER,
        LoRA(rank=2, modules_to_save=("lm_head", "embed_tokens")),
    ],
    ids=["freeze", "freeze but embeddings", "lora", "lora with embeddings and head"],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_frozen_weights_and_adapters_are_shared_out_as_well(method, recompute, tmp_path):
    changes = {"method": method, "recompute": recompute, "train": ONES, **UNEVEN}
    compare(2, tmp_path, parallel={"pp": 2}, **changes)


@pytest.mark.parametrize(
    "parallel",
    [
        {"pp": 2, "dp_shard": 2},
        {"pp": 2, "dp_replicate": 2},
        {"pp": 2, "tp": 2},
        {"pp": 4},
        {"pp": 2, "dp_shard": 2, "pp_schedule": "interleaved"},
    ],
    ids=str,
)
def test_four_share_layers_and_more(parallel, tmp_path):
    changes = {"kind": "qwen2", "num_hidden_layers": 5, "train": ONES, **UNEVEN}
    compare(4, tmp_path, parallel=parallel, **changes)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
@pytest.mark.parametrize("size", [1, 2, 6])
def test_each_schedule_with_few_and_many_micro_batches(schedule, size, tmp_path):
    changes = {"num_hidden_layers": 4, "train": {"micro_batch_size": size}}
    compare(2, tmp_path, parallel={"pp": 2, "pp_schedule": schedule}, **changes)


def test_in_float64_only_rounding_is_left(tmp_path):
    changes = {"kind": "qwen2", "dtype": torch.float64, "train": ONES, **UNEVEN}
    compare(4, tmp_path, parallel={"pp": 2, "tp": 2}, close=1e-10, **changes)


def test_in_bfloat16_the_sums_are_rounded(tmp_path):
    train = {"precision": "bf16", **ONES}
    compare(2, tmp_path, parallel={"pp": 2}, close=5e-3, train=train, **UNEVEN)
