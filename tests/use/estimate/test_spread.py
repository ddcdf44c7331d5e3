"""What the first of two processes that share every matrix takes, against two that do."""

import pytest
import torch
from transformers import PreTrainedModel

import ranks
from surefoot.batch import OutputSpec
from surefoot.errors import RecipeError
from surefoot.model import outputs
from surefoot.model.numerics import autocast
from surefoot.parallel.section import ParallelSection
from surefoot.parallel.sharded_model import shard
from surefoot.parallel.tensor_parallel import widened
from surefoot.parallel.vocab_parallel import cut_vocabulary
from surefoot.use.estimate._dry_run import LiveBytes, describe, dry_run_batch
from surefoot.use.estimate._memory_model import MeshShape, memory

from .scene import batch, local, policy, recipe, resized, skeleton

SIZES = {"hidden_size": 256, "intermediate_size": 704, "head_dim": 64, "vocab_size": 2001}
SIZES["num_hidden_layers"] = 4


def spread(world, made, micro_batch, precision, sequence):
    """The real policy over ``world``; how to run it forward and backward."""
    model, dtype = policy(made), torch.bfloat16 if precision == "bf16" else None
    inner = model if isinstance(model, PreTrainedModel) else model.get_base_model()
    section = ParallelSection(tp=world.tp, sequence_parallel=sequence)
    shard(model, inner, world, section, dtype=dtype)
    wide = widened(micro_batch, world.tp if sequence else 1)
    vocabulary = cut_vocabulary(inner, world)

    def run():
        with autocast(precision, torch.device("cpu")):
            found = outputs.compute(model, wide, OutputSpec(("logps",)), vocabulary=vocabulary)
        loss = made.stage.loss("policy", found, micro_batch).total
        del found
        loss.backward()

    return model, run


def measured(world, made, micro_batch, precision, sequence):
    """Bytes of the weights and gradients of this process, and the most that it takes."""
    model, run = spread(world, made, micro_batch, precision, sequence)
    at_work = []
    given = resized(lambda: [live.look() for live in at_work])
    for _ in range(2):  # gradients and storages are there the second time
        given[0] = 0
        own = [*map(local, model.parameters()), *model.buffers()]
        gradients = sum(local(p.grad).nbytes for p in model.parameters() if p.grad is not None)
        with LiveBytes(own, 10**9, lambda: given[0]) as live:
            at_work[:] = [live]
            run()
        weights = sum(tensor.nbytes for tensor in own)
    return weights, gradients, weights + gradients + live.growing


@pytest.mark.parametrize(
    ("kind", "method", "precision", "recomputes", "sequence", "packing"),
    [
        pytest.param("llama", "full", "fp32", False, False, True, marks=pytest.mark.proof),
        pytest.param("llama", "full", "fp32", False, True, False, marks=pytest.mark.proof),
        ("qwen2", "full", "bf16", True, True, True),
        pytest.param("llama", "lora", "bf16", False, False, False, marks=pytest.mark.proof),
        pytest.param("llama", "lora", "fp32", False, True, True, marks=pytest.mark.proof),
    ],
)
def test_the_peak_is_that_of_the_first_of_two(
    tmp_path, kind, method, precision, recomputes, sequence, packing
):
    made = recipe(
        tmp_path,
        kind,
        method=method,
        changes=SIZES,
        model={"gradient_checkpointing": recomputes},
        data={"packing": packing},
    )
    micro_batch, dtype = batch(made, 61, 40), torch.bfloat16 if precision == "bf16" else None
    two = {"tp": 2, "sequence_parallel": sequence}
    found = memory(
        describe(skeleton(made, precision, **two)),
        dry_run_batch(skeleton(made, precision, gathered=dtype, **two), micro_batch),
        MeshShape(tp=2),
        compute_size=2 if dtype else 0,
        accumulates=True,
    )
    real = ranks.run(2, lambda w: measured(w, made, micro_batch, precision, sequence), tp=2)
    weights, gradients, peak = real[0]
    assert (found.weights, found.gradients) == (weights, gradients)
    assert found.peak - found.optimizer == pytest.approx(peak, rel=0.15)


@pytest.mark.proof
@pytest.mark.parametrize(
    "sequence", [pytest.param(False, marks=pytest.mark.proof), True], ids=["", "sequence"]
)
def test_what_is_kept_is_what_the_first_of_two_saves(tmp_path, sequence):
    made = recipe(tmp_path, changes=SIZES, data={"packing": True})
    micro_batch = batch(made, 61, 40)

    def saved(world):
        policy, run = spread(world, made, micro_batch, "fp32", sequence)
        own = [*map(local, policy.parameters()), *policy.buffers()]
        known, kept = {t.untyped_storage()._cdata for t in own}, {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in known and not isinstance(tensor, torch.nn.Parameter):
                kept[storage._cdata] = storage  # of gathered weights, nothing is left at the end
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run()
        return sum(storage.nbytes() for storage in kept.values())

    two = {"tp": 2, "sequence_parallel": sequence}
    found = dry_run_batch(skeleton(made, **two), micro_batch).kept.total
    assert found == pytest.approx(ranks.run(2, saved, tp=2)[0], rel=0.02)


@pytest.mark.proof
def test_tokens_that_are_cut_keep_less_for_the_backward_pass(tmp_path):
    made = recipe(tmp_path, model={"gradient_checkpointing": True}, changes=SIZES)
    kept = [
        dry_run_batch(
            skeleton(made, tp=4, sequence_parallel=sequence), batch(made, 64)
        ).kept.activations
        for sequence in (False, True)
    ]
    layer = 64 * SIZES["hidden_size"] * 4
    assert kept[0] - kept[1] == SIZES["num_hidden_layers"] * layer * 3 // 4


def test_logits_are_those_of_a_part_of_the_vocabulary(tmp_path):
    made = recipe(tmp_path, changes=SIZES)
    two, four = (dry_run_batch(skeleton(made, tp=tp), batch(made, 64)) for tp in (2, 4))
    assert four.kept.logits == pytest.approx(two.kept.logits / 2, rel=0.01)
    assert two.kept.logits > 0


def test_a_whole_head_keeps_no_logits(tmp_path):
    made = recipe(tmp_path, changes=SIZES)
    assert dry_run_batch(skeleton(made), batch(made, 64)).kept.logits == 0


def test_heads_that_cannot_be_shared_stop_the_plan_as_they_stop_the_run(tmp_path):
    with pytest.raises(RecipeError, match="the 4 attention heads"):
        skeleton(recipe(tmp_path), tp=3)
