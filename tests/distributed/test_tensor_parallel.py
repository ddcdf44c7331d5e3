"""Processes that share every matrix learn what one process learns that has all of them."""

import pytest
import torch

import ranks
from spread import UNEVEN, compare, learn, trainer
from surefoot.checkpoint.state.states import local_box_of
from surefoot.methods import Freeze, Full, LoRA

STEPS = 2
ADAPTER = LoRA(rank=2, alpha=8.0)
ALL_BUT_QWEN3 = [pytest.param(kind, marks=pytest.mark.proof) for kind in ("llama", "qwen2")]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"kind": "qwen2", **UNEVEN}, marks=pytest.mark.proof),  # tied, with biases
        pytest.param({"kind": "gemma2", "packing": True}, marks=pytest.mark.proof),
        {"kind": "phi3"},  # query, key and value in one matrix
        *(
            pytest.param(changes, marks=pytest.mark.proof)
            for changes in (
                {"kind": "llama", **UNEVEN},
                {"kind": "qwen3"},  # with norms of each head
                {"kind": "olmo2", "pad_token_id": 63},  # norms over all heads
            )
        ),
    ],
    ids=lambda changes: changes["kind"],
)
def test_two_share_every_matrix(changes, tmp_path):
    compare(2, tmp_path, parallel={"tp": 2}, **changes)


@pytest.mark.parametrize("kind", [*ALL_BUT_QWEN3, "qwen3"])
def test_four_share_two_key_value_heads(kind, tmp_path):
    compare(4, tmp_path, parallel={"tp": 4}, kind=kind, **UNEVEN)


@pytest.mark.parametrize(
    ("kind", "replicate"),
    [
        ("llama", 2),
        pytest.param("qwen2", 1, marks=pytest.mark.proof),
        pytest.param("llama", 1, marks=pytest.mark.proof),
        pytest.param("qwen2", 2, marks=pytest.mark.proof),
    ],
)
def test_each_of_two_parts_is_sharded_or_copied_again(kind, replicate, tmp_path):
    parallel = {"tp": 2, "dp_replicate": replicate}
    compare(4, tmp_path, parallel=parallel, kind=kind, **UNEVEN)


@pytest.mark.proof
def test_in_float64_only_rounding_is_left(tmp_path):
    changes = {"kind": "qwen2", "dtype": torch.float64, **UNEVEN}
    compare(4, tmp_path, parallel={"tp": 2, "dp_shard": 2}, close=1e-10, **changes)


def test_in_bfloat16_the_sums_are_rounded(tmp_path):
    train = {"precision": "bf16"}
    compare(2, tmp_path, parallel={"tp": 2}, close=5e-3, train=train, **UNEVEN)


@pytest.mark.parametrize(
    "method",
    [
        Freeze(num_layers=1, modules=("mlp",), extra_modules=("norm",)),
        pytest.param(ADAPTER, marks=pytest.mark.proof),
        pytest.param(
            LoRA(rank=2, dropout=0.3, modules_to_save=("lm_head",)), marks=pytest.mark.proof
        ),
    ],
    ids=["freeze", "lora", "lora with dropout"],
)
def test_frozen_weights_and_adapters_are_cut_as_well(method, tmp_path):
    compare(2, tmp_path, parallel={"tp": 2}, method=method, **UNEVEN)


@pytest.mark.proof
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.proof)])
def test_an_adapter_beside_parts_of_parts(tp, tmp_path):
    compare(4, tmp_path, parallel={"tp": tp}, method=ADAPTER, kind="qwen2", **UNEVEN)


@pytest.mark.proof
def test_packed_rows_with_recomputed_activations(tmp_path):
    compare(2, tmp_path, parallel={"tp": 2}, packing=True, recompute=True, method=ADAPTER)


def copies(world, folder, method, **changes):
    """The bytes of every part of what learns, by name, after some steps."""
    made = trainer(world, folder, method=method, attention_dropout=0.2, **UNEVEN, **changes)
    learn(made, STEPS)
    found = {}
    for group in made.policy.step.optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            one = local_box_of(name, parameter.detach(), made.policy.weights.cuts_of(name))
            found[name, one.box.start] = one.values.numpy().tobytes()
    return found


def assert_copies_are_equal(folder, method, parallel):
    seen = {}
    work = lambda world: copies(world, folder, method, parallel=parallel)  # noqa: E731
    for found in ranks.run(4, work, **parallel):
        for place, data in found.items():
            assert seen.setdefault(place, data) == data, place


@pytest.mark.parametrize(
    "method",
    [pytest.param(Full(), marks=pytest.mark.proof), LoRA(rank=2, dropout=0.3)],
    ids=["full", "lora"],
)
def test_copies_stay_equal_to_the_bit_with_dropout(method, tmp_path):
    assert_copies_are_equal(tmp_path, method, {"tp": 4})


def test_a_row_counts_once_in_sums():
    found = ranks.run(4, lambda world: world.sums([1.0 + world.data_rank, 0.5]), tp=2)
    assert found == [[3.0, 1.0]] * 4


def test_a_failure_of_one_rank_is_what_is_told():
    def work(world):
        if world.rank == 1:
            raise ValueError("one has failed")
        world.wait()

    with pytest.raises(AssertionError, match=r"rank 1:(.|\n)*one has failed"):
        ranks.run(2, work)
