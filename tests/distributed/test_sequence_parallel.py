"""Processes that share every matrix, and the tokens in between, learn what one process learns."""

import pytest
import torch

import ranks
import small
from spread import UNEVEN, compare, trainer
from surefoot.methods import Freeze, Full, LoRA
from test_pipeline import compare as compare_pipelines
from test_tensor_parallel import assert_copies_are_equal

TWO = {"tp": 2, "sequence_parallel": True}
FOUR = {"tp": 4, "sequence_parallel": True}
STAGES = {**TWO, "pp": 2}
ADAPTER = LoRA(rank=2, alpha=8.0)
FREEZE = Freeze(num_layers=1, modules=("mlp",), extra_modules=("norm",))
SEEN = {"global_batch_size": 6, "micro_batch_size": 2}  # of lengths that 2 and 4 do not divide


def compare_parts(count, folder, *, parallel, **changes):
    compare(count, folder, parallel=parallel, **{"train": SEEN, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "qwen2", "packing": True, **UNEVEN},  # tied, with biases
        pytest.param(
            {"kind": "gemma2", "packing": True}, marks=pytest.mark.proof
        ),  # four norms in a layer, capped logits
        pytest.param({"kind": "phi3"}, marks=pytest.mark.proof),  # attention that all do whole
        *(
            pytest.param(changes, marks=pytest.mark.proof)
            for changes in (
                {"kind": "llama", "attention_bias": True, "mlp_bias": True, **UNEVEN},
                {"kind": "qwen3"},  # with norms of each head
                {"kind": "olmo2", "pad_token_id": 63},  # norms over all heads
            )
        ),
    ],
    ids=lambda changes: changes["kind"],
)
def test_two_share_matrices_and_tokens(changes, tmp_path):
    compare_parts(2, tmp_path, parallel=TWO, **changes)


@pytest.mark.proof
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("method", [Full(), ADAPTER], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "olmo2"])
def test_four_share_matrices_and_tokens(kind, method, packing, tmp_path):
    changes = {"kind": kind, "pad_token_id": 63, "method": method, "packing": packing}
    compare_parts(4, tmp_path, parallel=FOUR, **changes)


@pytest.mark.proof
def test_four_share_two_key_value_heads_and_fewer_tokens(tmp_path):
    compare_parts(4, tmp_path, parallel=FOUR, kind="qwen3", method=ADAPTER, **UNEVEN)


@pytest.mark.proof
@pytest.mark.parametrize("replicate", [pytest.param(1, marks=pytest.mark.proof), 2])
def test_each_of_two_parts_is_sharded_or_copied_again(replicate, tmp_path):
    parallel = {**TWO, "dp_replicate": replicate}
    train = {"global_batch_size": 6, "micro_batch_size": 3}
    compare_parts(4, tmp_path, parallel=parallel, kind="qwen2", train=train, **UNEVEN)


def test_in_float64_only_rounding_is_left(tmp_path):
    changes = {"kind": "qwen2", "dtype": torch.float64, "method": ADAPTER, **UNEVEN}
    compare_parts(2, tmp_path, parallel=TWO, close=1e-10, **changes)


def compare_stages(folder, schedule="1f1b", **changes):
    parallel = {**STAGES, "pp_schedule": schedule}
    changes = {"num_hidden_layers": 4, "train": SEEN, **UNEVEN, **changes}
    compare_pipelines(4, folder, parallel=parallel, **changes)


@pytest.mark.proof
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"kind": "qwen2", "packing": True}, marks=pytest.mark.proof),  # tied
        {"kind": "llama", "method": ADAPTER, "schedule": "interleaved"},
    ],
    ids=lambda changes: changes["kind"],
)
def test_two_stages_pass_parts_of_the_tokens_on(changes, tmp_path):
    compare_stages(tmp_path, **changes)


@pytest.mark.proof
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("method", [Full(), FREEZE, ADAPTER], ids=["full", "freeze", "lora"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2"])
def test_two_stages_of_any_model_pass_parts_of_the_tokens_on(
    kind, schedule, method, packing, tmp_path
):
    changes = {"kind": kind, "method": method, "packing": packing, "recompute": packing}
    changes |= {"schedule": schedule, "pad_token_id": 63, "dtype": torch.float64}
    compare_stages(tmp_path, close=1e-10, **changes)


@pytest.mark.proof
def test_in_bfloat16_the_sums_are_rounded(tmp_path):
    train = {"precision": "bf16"}
    compare_parts(2, tmp_path, parallel=TWO, close=5e-3, train=train, **UNEVEN)


@pytest.mark.parametrize(
    "method",
    [
        FREEZE,
        pytest.param(ADAPTER, marks=pytest.mark.proof),
        LoRA(rank=2, modules_to_save=("lm_head", "input_layernorm")),
        pytest.param(
            LoRA(rank=2, targets=("lm_head", "down_proj", "k_proj")), marks=pytest.mark.proof
        ),
    ],
    ids=["freeze", "lora", "lora with saved modules", "lora beside the head"],
)
def test_frozen_weights_and_adapters(method, tmp_path):
    compare_parts(2, tmp_path, parallel=TWO, method=method, **UNEVEN)


@pytest.mark.proof
@pytest.mark.parametrize(
    "method", [pytest.param(Full(), marks=pytest.mark.proof), ADAPTER], ids=["full", "lora"]
)
def test_recomputed_activations(method, tmp_path):
    compare_parts(2, tmp_path, parallel=TWO, packing=True, recompute=True, method=method)


def test_adapters_of_matrices_that_are_gathered(tmp_path):
    compare_parts(2, tmp_path, parallel=TWO, method=ADAPTER, kind="phi3")


def test_dropout_is_that_of_one_process_where_parts_are_equal(tmp_path):
    method = LoRA(rank=2, dropout=0.3)
    examples = small.examples()
    examples[:] = [item for item in examples if len(item["labels"]) == 6] * 6
    compare_parts(2, tmp_path, parallel=TWO, method=method, examples=examples)


def test_tokens_that_do_not_divide_are_refused_not_waited_for(tmp_path):
    def forward(world):
        made = trainer(world, tmp_path, parallel=TWO)
        with pytest.raises(ValueError, match="5 tokens do not divide into 2 equal shards"):
            made.policy.module(input_ids=torch.arange(5)[None])
        return True

    assert ranks.run(2, forward, **TWO) == [True, True]


@pytest.mark.proof
@pytest.mark.parametrize(
    "method",
    [pytest.param(Full(), marks=pytest.mark.proof), LoRA(rank=2, dropout=0.3)],
    ids=["full", "lora"],
)
def test_copies_stay_equal_to_the_bit_with_dropout(method, tmp_path):
    assert_copies_are_equal(tmp_path, method, FOUR)
