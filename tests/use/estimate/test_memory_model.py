"""Parts of the memory, against real models, optimizers and shards, and by hand."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from each import some
from surefoot.model.numerics import autocast
from surefoot.optim._rules import few_bits as chunks
from surefoot.optim._variants.adamw import AdamW
from surefoot.optim.bf16_weights import build_optimizer, update_size
from surefoot.parallel.section import ParallelSection
from surefoot.parallel.sharded_model import shard
from surefoot.parallel.sharding import AXES
from surefoot.parallel.world import World
from surefoot.use.estimate._dry_run import LiveBytes, describe, dry_run_batch
from surefoot.use.estimate._memory_model import MeshShape, Pass, Snapshot, Weight, gathered, memory
from surefoot.use.estimate._rank_memory import Machine, PlanBase, memory_of

from .scene import batch, head_of, local, policy, recipe, resized, skeleton, total

NOTHING = Pass(Snapshot(0, 0, 0), Snapshot(0, 0, 0), 0, 0)
METHODS = ["full", {"freeze": {"num_layers": 2}}, {"lora": {"rank": 3}}]


def stepped(made, model):
    """The bytes of weights, gradients and optimizer states once a step is taken."""
    learning = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = build_optimizer(made.optim, learning)
    for _, parameter in learning:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [t for state in optimizer.state.values() for t in state.values()]
    own = [*model.parameters(), *model.buffers()]
    return tuple(
        sum(local(tensor).nbytes for tensor in tensors)
        for tensors in (own, [p.grad for _, p in learning], states)
    )


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("kind", some(["llama", "qwen2"], ["qwen2"]))
def test_weights_gradients_and_states_are_those_of_a_real_model(tmp_path, kind, method):
    made = recipe(tmp_path, kind, method=method)
    found = memory(describe(skeleton(made)), NOTHING, MeshShape(), compute_size=0, accumulates=True)
    assert (found.weights, found.gradients, found.optimizer) == stepped(made, policy(made))
    assert found.peak == found.weights + found.gradients + found.optimizer


@pytest.mark.parametrize("mode", ["stochastic", "master", "nearest"])
def test_weights_in_bfloat16_have_states_as_they_are_updated(mode, tmp_path):
    optim = {"adamw": {"bf16_weights": mode}}
    made = recipe(tmp_path, model={"dtype": "bfloat16"}, optim=optim)
    found = memory(
        describe(skeleton(made, dtype=torch.bfloat16)),
        NOTHING,
        MeshShape(),
        compute_size=0,
        accumulates=True,
    )
    assert (found.weights, found.gradients, found.optimizer) == stepped(made, policy(made))


@pytest.mark.parametrize("mode", ["stochastic", "master"])
def test_the_memory_of_an_update_of_bfloat16_weights_is_that_of_a_real_one(mode, monkeypatch):
    monkeypatch.setattr("surefoot.optim.bf16_weights.BUCKET", 3000)
    monkeypatch.setitem(chunks._ELEMENTS, "cpu", 64)
    shapes = [(64, 16), (100, 30), (20, 20), (40, 30), (30,)]
    named = [
        (f"{i}", torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)))
        for i, shape in enumerate(shapes)
    ]
    optimizer = build_optimizer(AdamW(bf16_weights=mode), named)
    for _, parameter in named:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with LiveBytes([], 0, lambda: 0) as live:
        optimizer.step()
    expected = update_size([math.prod(shape) for shape in shapes], mode)
    assert expected <= live.peak.total <= expected + 64 * 40


def test_a_state_in_main_memory_takes_memory_of_a_gpu_for_one_bucket_only(tmp_path, monkeypatch):
    monkeypatch.setattr("surefoot.optim.bf16_weights.BUCKET", 3000)

    def found(*, on_gpu, offload_state):
        made = recipe(tmp_path, optim={"adamw": {"offload_state": offload_state}})
        held = skeleton(made)
        machine, none = Machine(1, on_gpu=on_gpu), np.arange(0)
        ground = PlanBase(held.parts, machine, MeshShape(), None, none, none, None)
        return memory_of(ground, held, NOTHING)

    plain, offloaded = (found(on_gpu=True, offload_state=one) for one in (False, True))
    assert 0 < offloaded.optimizer < plain.optimizer / 10  # the numbers of updates
    assert 0 < offloaded.working < plain.optimizer
    assert found(on_gpu=False, offload_state=True) == found(on_gpu=False, offload_state=False)


def test_an_update_counts_where_it_takes_more_than_activations():
    weight = Weight((10, 10), 2, True, None, state=800)
    one = Pass(Snapshot(0, 0, 0), Snapshot(50, 0, 0), 50, 50)
    options = {"compute_size": 0, "accumulates": False}
    for update, more in ((0, 0), (20, 20), (900, 900)):
        found = memory([weight], one, MeshShape(), **options, update=update)
        assert found.peak == 200 + 800 + max(200, 200 + more)
        assert found.working == max(50, more)


def inner(model):
    return model if isinstance(model, PreTrainedModel) else model.get_base_model()


@pytest.fixture
def three_processes():
    """The first of three, whose others only seem to be there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    yield lambda *shape: World(0, 3, init_device_mesh("cpu", (1, *shape, 1), mesh_dim_names=AXES))
    dist.destroy_process_group()


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("shape", [(1, 3), pytest.param((3, 1), marks=pytest.mark.proof)], ids=str)
def test_the_first_process_of_several_holds_what_fsdp_leaves_it(
    tmp_path, three_processes, shape, method
):
    made = recipe(tmp_path, method=method)  # 3 divides none of its sizes
    model = policy(made)
    shard(model, inner(model), three_processes(*shape), ParallelSection(), dtype=None)
    found = memory(
        describe(skeleton(made)), NOTHING, MeshShape(*shape), compute_size=0, accumulates=True
    )
    assert (found.weights, found.gradients, found.optimizer) == stepped(made, model)


@given(st.integers(1, 50), st.integers(1, 12), st.integers(0, 3))
def test_the_share_is_the_first_of_torchs_chunks(rows, count, columns):
    shape = (rows, *[2] * columns)
    expected = torch.empty(shape).chunk(count)[0].numel()
    assert Weight(shape, 4, True, None).share(count) == expected


def test_what_is_not_cut_stays_whole():
    assert Weight((8, 2), 4, False, None, is_cut=False).share(4) == 16
    assert Weight((), 4, True, None).share(4) == 1


def layers(*sizes, item_size=4, trained=True):
    return [Weight((size,), item_size, trained, i) for i, size in enumerate(sizes)]


def test_what_is_gathered_is_given_back_layer_by_layer():
    outside = Weight((100,), 4, True, None)
    first = Weight((50,), 4, True, None, is_last=True)
    found = gathered([outside, first, *layers(10, 30, 20)], MeshShape(1, 2), 0)
    assert found.between == 4 * 150
    assert found.at_work == 4 * (150 + 100 + 2 * 30 + 30 + 30), "the embeddings' gradient is last"
    assert found.at_end == 4 * (150 + 2 * 150 + 2 * 30)


def test_what_is_gathered_in_two_bytes_is_summed_in_four():
    found = gathered(layers(10, 30, 20), MeshShape(1, 2), 2)
    assert found.at_work == 2 * (2 * 30) + (2 + 4) * 30


def test_layers_that_are_not_given_back_are_all_there_until_their_backward_pass():
    found = gathered(layers(10, 30, 20), MeshShape(1, 2, reshard_after_forward=False), 2)
    assert found.between == 2 * 60
    assert found.at_work == 2 * 60 - 2 * 30 + (2 + 4) * 30


def test_frozen_layers_are_gathered_but_have_no_gradients():
    found = gathered(layers(10, 10, trained=False), MeshShape(1, 2), 2)
    assert (found.between, found.at_work, found.at_end) == (0, 3 * 2 * 10, 0)


@pytest.mark.parametrize(
    ("method", "precision", "again"),
    [
        pytest.param("full", "fp32", True, marks=pytest.mark.proof),
        pytest.param("full", "bf16", True, marks=pytest.mark.proof),
        pytest.param("full", "bf16", False, marks=pytest.mark.proof),
        ("lora", "bf16", True),
        pytest.param("lora", "fp32", False, marks=pytest.mark.proof),
    ],
)
def test_the_peak_of_one_of_three_is_what_fsdp_takes(
    tmp_path, three_processes, monkeypatch, method, precision, again
):
    sizes = {"hidden_size": 256, "intermediate_size": 704, "head_dim": 64, "vocab_size": 2000}
    sizes["num_hidden_layers"] = 4
    made = recipe(tmp_path, method=method, changes=sizes)
    micro_batch, dtype = batch(made, 20, 12), torch.bfloat16 if precision == "bf16" else None
    found = memory(
        describe(skeleton(made, precision)),
        dry_run_batch(skeleton(made, precision, gathered=dtype), micro_batch),
        MeshShape(1, 3, again),
        compute_size=2 if dtype else 0,
        accumulates=True,
    )
    model, section = policy(made), ParallelSection(reshard_after_forward=again)
    head = head_of(model)
    shard(model, inner(model), three_processes(1, 3), section, dtype=dtype)
    at_work = []
    patch = partial(monkeypatch.setattr, raising=False)
    given = resized(lambda: [live.look() for live in at_work], patch)
    for _ in range(2):  # gradients and storages are there the second time
        given[0], gradients = 0, sum(local(p.grad).nbytes for p in grown(model))
        own = [*map(local, model.parameters()), *model.buffers()]
        with LiveBytes(own, 10**9, lambda: given[0]) as live:
            at_work[:] = [live]
            with autocast(precision, torch.device("cpu")):
                loss = total(model, micro_batch, head)
            loss.backward()
    measured = found.weights + found.optimizer + gradients + live.growing
    assert found.peak == pytest.approx(measured, rel=0.15)


def grown(model):
    return [p for p in model.parameters() if p.grad is not None]


def test_gradients_are_there_beside_activations_if_a_step_has_several_passes():
    weights = [Weight((1000,), 4, True, None, state=8000, scalars=4)]
    passed = Pass(Snapshot(500, 50, 5), Snapshot(600, 150, 5), 700, growing=900)
    several, one = (
        memory(weights, passed, MeshShape(), compute_size=0, accumulates=a) for a in (True, False)
    )
    assert several.peak == 4000 + 8004 + 4000 + 755
    assert sum(several.parts().values()) == several.peak
    assert one.peak == 4000 + 8004 + 4000, "the gradients are more than the pass ever takes"
    large = replace(passed, growing=5000)
    assert memory(weights, large, MeshShape(), compute_size=0, accumulates=False).peak == 17004
    assert (several.activations, several.working, several.logits, several.buffers) == (
        500,
        100,
        150,
        5,
    )


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(1, 8),
    st.sampled_from([0, 2]),
    st.booleans(),
)
def test_more_shards_never_take_more(sizes, count, compute_size, again):
    weights = [Weight((7, 3), 4, True, None, state=168), *layers(*sizes)]
    passed = Pass(Snapshot(10, 5, 0), Snapshot(12, 9, 0), 15, 30)
    peaks = [
        memory(
            weights,
            passed,
            MeshShape(2, shards, again),
            compute_size=compute_size,
            accumulates=True,
        ).peak
        for shards in (count, 2 * count)
    ]
    assert peaks[1] <= peaks[0]
    assert all(math.isfinite(peak) for peak in peaks)
