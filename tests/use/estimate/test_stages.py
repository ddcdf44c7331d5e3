"""What the processes of a pipeline take, against two that run one."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import ranks
from surefoot.batch import OutputSpec
from surefoot.network.open import open_network
from surefoot.run.policy import options_of
from surefoot.use.estimate.dry_run import describe
from surefoot.use.estimate.live_bytes import LiveBytes
from surefoot.use.estimate.memory_model import MeshShape, memory
from surefoot.use.estimate.rank_memory import dry_run_window

from .scene import batch, recipe, skeleton, tokenizer
from .test_spread import SIZES, local, resized


def piped(world, made, precision):
    """The policy of this process; how to run a window through the pipeline."""
    made = replace(made, train=replace(made.train, precision=precision))
    base, options = Path(made.model.path), options_of(made)
    network = open_network(base, made.model, tokenizer(made), world, options)
    run = partial(network.forward_backward, spec=OutputSpec(made.stage.spec.outputs))
    return network.module.train(), run


def measured(world, made, micro_batch, precision, count):
    """Bytes of the weights of this process, and the most that it takes."""
    model, run = piped(world, made, precision)
    at_work = []
    given = resized(lambda: [live.look() for live in at_work])
    for _ in range(2):  # storages are there the second time
        model.zero_grad()
        given[0] = 0
        own = [*map(local, model.parameters()), *model.buffers()]
        with LiveBytes(own, 10**9, lambda: given[0]) as live:
            at_work[:] = [live]
            run([micro_batch] * count, partial(made.stage.loss, "policy"), before=id, after=id)
        weights = sum(tensor.nbytes for tensor in own)
    return weights, weights + live.growing


def planned(made, micro_batch, precision, count, mesh, place):
    dtype = torch.bfloat16 if precision == "bf16" else None
    own = {"pp": 2, "place": place, "num_parts": made.parallel.num_parts}
    return memory(
        describe(skeleton(made, precision, **own)),
        dry_run_window(skeleton(made, precision, gathered=dtype, **own), micro_batch, count),
        mesh,
        compute_size=2 if dtype else 0,
        accumulates=count > 1,
    )


FEW = [
    ("qwen2", "lora", "fp32", False, "1f1b", 4, 1),
]
MORE = [
    ("qwen2", "full", "fp32", True, "1f1b", 6, 1),  # embedding tied to the head
    ("llama", "full", "bf16", False, "gpipe", 5, 1),
    ("llama", "full", "fp32", False, "1f1b", 6, 1),
    ("llama", "full", "bf16", True, "1f1b", 6, 1),
    ("llama", "lora", "bf16", True, "1f1b", 4, 1),
    ("qwen2", "full", "bf16", False, "1f1b", 1, 1),
    ("qwen2", "full", "fp32", False, "interleaved", 4, 1),
    ("llama", "full", "fp32", False, "1f1b", 4, 2),
    ("qwen2", "lora", "bf16", True, "1f1b", 4, 2),
    ("qwen2", "full", "bf16", True, "1f1b", 4, 2),
]


@pytest.mark.parametrize(
    ("kind", "method", "precision", "recomputes", "schedule", "count", "shards"),
    [*FEW, *(pytest.param(*case, marks=pytest.mark.proof) for case in MORE)],
)
def test_each_of_two_stages_takes_what_is_planned(
    tmp_path, kind, method, precision, recomputes, schedule, count, shards
):
    made = recipe(
        tmp_path,
        kind,
        method=method,
        changes=SIZES,
        model={"gradient_checkpointing": recomputes},
        data={"packing": True},
        parallel={"pp": 2, "pp_schedule": schedule},
    )
    micro_batch, mesh = batch(made, 161, 140), MeshShape(dp_shard=shards, pp=2)
    real = ranks.run(2 * shards, lambda w: measured(w, made, micro_batch, precision, count), pp=2)
    for place, (weights, peak) in enumerate(real[::shards]):
        found = planned(made, micro_batch, precision, count, mesh, place)
        assert found.weights == weights
        assert found.peak - found.optimizer == pytest.approx(peak, rel=0.15)
