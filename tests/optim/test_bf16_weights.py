"""Updates of bfloat16 weights: right in the mean, or of a float32 copy; resumed to the bit."""

import copy

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import ranks
import small
import tiny
from each import some
from surefoot.errors import RecipeError
from surefoot.methods import LoRA
from surefoot.optim._variants.adamw import AdamW, AdamW8bit
from surefoot.optim._variants.schedule_free import ScheduleFree
from surefoot.optim.bf16_weights import (
    BUCKET,
    MASTER,
    BucketedOptimizer,
    build_optimizer,
    move_weights,
    offloaded_size,
    round_stochastically,
    update_size,
)
from surefoot.optim.state import NamedState, check_cuts
from surefoot.optim.trained import TrainedParameters
from surefoot.parallel.sharding import AxisShard

MODES = ("stochastic", "master")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def rounded(values, seed=0):
    return round_stochastically(values, values.bfloat16(), generator(seed))


def test_rounding_gives_a_neighbor_and_the_value_in_the_mean():
    values = torch.randn(64, generator=generator()).exp() * torch.tensor([1.0, -1.0]).repeat(32)
    many = values.repeat(20_000, 1)
    found = rounded(many).double()
    low = (values.view(torch.int32) & -65536).view(torch.float32)
    high = ((values.view(torch.int32) & -65536) + 65536).view(torch.float32)
    assert ((found == low) | (found == high)).all()
    step = (high - low).abs().double()
    assert ((found.mean(0) - values).abs() < 5 * step / 2 / 20_000**0.5).all()


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0e38, 1e-40, float("inf"), float("-inf")])
def test_a_value_that_bfloat16_has_is_not_changed(value):
    exact = torch.full((1000,), value).bfloat16()
    assert torch.equal(rounded(exact.float()), exact)


def test_no_bits_of_nan_become_a_number():
    bits = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32)
    assert rounded(bits.view(torch.float32).repeat(100)).isnan().all()


def weight(dtype=torch.bfloat16, shape=(8, 16)):
    return torch.nn.Parameter(torch.linspace(-1, 1, 128).view(shape).to(dtype))


def drive(mode, steps, *, named=None, dtype=torch.bfloat16, rate=1e-4):
    """Steps with a constant gradient, each update far below half a step of bfloat16."""
    named = named or {"a.weight": weight(dtype)}
    made = TrainedParameters(AdamW(learning_rate=rate, bf16_weights=mode), named)
    go_on(made, range(steps))
    return made


def go_on(made, steps):
    for step in steps:
        optimizer = made.at(step)
        for p in made.named.values():
            p.grad = torch.full_like(p, 0.01)
        optimizer.step()
        optimizer.zero_grad()


def test_small_updates_are_lost_to_the_nearest_value_and_by_nothing_else():
    exact = drive("nearest", 100, dtype=torch.float32).named["a.weight"].detach()
    start = weight().detach().float()
    moved = float((exact - start).mean())
    found = {m: drive(m, 100).named["a.weight"].detach().float() for m in ("nearest", *MODES)}
    large = start.abs() > 0.5
    assert torch.equal(found["nearest"][large], start[large])
    for mode in MODES:
        assert float((found[mode] - start).mean()) == pytest.approx(moved, rel=0.15)


@pytest.mark.parametrize("mode", MODES)
def test_the_state_is_that_of_float32_weights(mode):
    found = drive(mode, 5).state_dict()["a.weight"]
    exact = drive("nearest", 5, named={"a.weight": torch.nn.Parameter(weight().detach().float())})
    expected = exact.state_dict()["a.weight"]
    assert found.keys() == expected.keys() | ({MASTER} if mode == "master" else set())
    for key, tensor in expected.items():
        assert found[key].dtype == torch.float32
        if key != "step":  # the gradient has been rounded
            torch.testing.assert_close(found[key], tensor, rtol=5e-3, atol=0)
    if mode == "master":
        torch.testing.assert_close(found[MASTER], exact.named["a.weight"].detach())


def test_parameters_of_other_types_are_updated_as_ever():
    named = {
        "a.weight": weight(),
        "b.weight": weight(torch.float32),
        "c.bias": weight(shape=(128,)),
    }
    made = drive("master", 3, named=named)
    plain = drive("nearest", 3, named={"b.weight": weight(torch.float32)})
    assert torch.equal(named["b.weight"], plain.named["b.weight"])
    assert MASTER not in made.state_dict()["b.weight"]
    assert made.state_dict().keys() == named.keys()
    assert [len(g["params"]) for g in made.optimizer.param_groups] == [2, 1]


@pytest.mark.parametrize("mode", MODES)
def test_many_small_parameters_are_updated_as_one_by_one(mode, monkeypatch):
    def named():
        return {f"{i}.weight": weight() for i in range(5)}

    at_once = drive(mode, 3, named=named())
    monkeypatch.setattr("surefoot.optim.bf16_weights.BUCKET", 300)
    in_parts = drive(mode, 3, named=named())
    for name, parameter in at_once.named.items():
        assert torch.equal(parameter, in_parts.named[name])


def test_a_step_that_is_not_finite_changes_nothing():
    named = {"a.weight": weight()}
    optimizer = build_optimizer(AdamW(learning_rate=0.1), named.items())
    before = named["a.weight"].detach().clone()
    named["a.weight"].grad = torch.full_like(before, float("nan"))
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert torch.equal(named["a.weight"], before)
    assert float(optimizer.state[named["a.weight"]]["step"]) == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("saved_by", ["nearest", *MODES])
def test_a_state_of_another_mode_is_taken_over(saved_by, mode):
    first = drive(saved_by, 3)
    named = {"a.weight": copy.deepcopy(first.named["a.weight"])}
    other = TrainedParameters(AdamW(bf16_weights=mode), named)
    other.load_state_dict(first.state_dict())
    go_on(other, [3])
    state = other.state_dict()["a.weight"]
    assert (MASTER in state) == (mode == "master")
    assert float(state["step"]) == 4 and state["exp_avg"].dtype == torch.float32


def model():
    return tiny.model("qwen3", dtype=torch.bfloat16, attention_dropout=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", some(MODES, ["stochastic"]))
def test_a_run_is_resumed_to_the_same_bits(mode, tmp_path):
    def make(folder, *members):
        optim = AdamW(learning_rate=5e-3, weight_decay=0.1, bf16_weights=mode)
        return small.trainer(folder, *members, model=model(), optim=optim)

    whole = make(tmp_path / "whole")
    whole.fit()
    make(tmp_path / "cut", small.StopAt(5)).fit()
    second = small.resume(make(tmp_path / "cut"), tmp_path / "cut" / "checkpoint-3")
    second.fit()
    small.assert_same_weights(small.weights(second), small.weights(whole))
    ours, theirs = (run.policy.trained.state_dict() for run in (second, whole))
    for name, state in theirs.items():
        assert state.keys() == ours[name].keys()
        assert all(torch.equal(tensor, ours[name][key]) for key, tensor in state.items())


def test_an_adapter_is_float32_on_a_bfloat16_base(tmp_path):
    made = small.trainer(tmp_path, model=model(), method=LoRA(rank=2))
    assert isinstance(made.policy.step.optimizer, torch.optim.AdamW)


def sharded(world):
    """A step on two ranks: a sharded parameter and a replicated one."""
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp",))
    named = {
        "a.weight": torch.nn.Parameter(distribute_tensor(weight().detach(), mesh, [Shard(0)])),
        "b.weight": torch.nn.Parameter(distribute_tensor(weight().detach(), mesh, [Replicate()])),
    }
    found = {}
    for mode in MODES:
        made = drive(mode, 3, named=copy.deepcopy(named))
        assert all(isinstance(p, DTensor) for p in made.named.values())
        state = made.state_dict()["a.weight"]
        assert all(isinstance(t, DTensor) for t in state.values() if t.ndim)
        found[mode] = {n: p.detach().full_tensor() for n, p in made.named.items()}
        found[mode]["own"] = made.named["b.weight"].to_local().detach()
    return found


def test_replicas_round_alike_and_shards_do_not():
    first, second = ranks.run(2, sharded)
    for mode in MODES:
        assert torch.equal(first[mode]["own"], second[mode]["own"])
        assert torch.equal(first[mode]["a.weight"], second[mode]["a.weight"])
    alone = drive("master", 3)
    assert torch.equal(first["master"]["a.weight"], alone.named["a.weight"])


def test_an_update_takes_no_more_than_a_bucket_or_the_largest_parameter():
    assert update_size([10, 20], "nearest") == 0
    assert update_size([10, 20], "stochastic") == 8 * 30
    assert update_size([BUCKET, 1, BUCKET + 7], "master") == 4 * (BUCKET + 7)
    assert update_size([BUCKET, 1, BUCKET - 1, 5], "stochastic") == 8 * BUCKET
    assert update_size([], "stochastic") == 0


@pytest.mark.parametrize("mode", ["nearest", *MODES])
@pytest.mark.parametrize("made", [AdamW, AdamW8bit, ScheduleFree])
def test_a_state_in_main_memory_is_updated_and_restored_as_any_other(made, mode, monkeypatch):
    monkeypatch.setattr("surefoot.optim.bf16_weights.BUCKET", 300)

    def run(offloads, state=None, number=0, steps=3):
        named = {f"{i}.weight": weight() for i in range(4)} | {"w": weight(torch.float32)}
        optim = made(learning_rate=1e-2, bf16_weights=mode)
        rule = optim.build(named.items())
        optimizer = BucketedOptimizer(rule, bf16_weights=mode, offloads=offloads)
        if state:
            NamedState(optimizer).load_state_dict(state[0])
            for name, parameter in named.items():
                parameter.data.copy_(state[1][name])
        for step in range(number, number + steps):
            optimizer.number = step
            move_weights(optimizer, for_gradients=True)
            for parameter in named.values():
                parameter.grad = torch.sin(parameter.detach() * (step + 1))
            optimizer.step()
            move_weights(optimizer, for_gradients=False)
        state = NamedState(optimizer).state_dict()
        return copy.deepcopy(state), {n: p.detach().clone() for n, p in named.items()}

    plain, offloaded = run(False, steps=5), run(True, steps=5)
    again = run(True, run(True, steps=2), 2)
    for other in (offloaded, again):
        for name, values in plain[0].items():
            assert torch.equal(plain[1][name], other[1][name])
            assert values.keys() == other[0][name].keys()
            for key, value in values.items():
                assert torch.equal(value, other[0][name][key])
                assert value.dtype == other[0][name][key].dtype


def test_only_the_state_of_one_bucket_leaves_main_memory():
    assert offloaded_size([(BUCKET, 8), (1, 3), (BUCKET - 1, 9), (5, 4)]) == 12
    assert offloaded_size([]) == 0


def test_a_state_in_main_memory_is_of_complete_parameters():
    cut = (AxisShard("dp_shard", 0),)
    check_cuts(AdamW(offload_state=True), (8, 6), (), "w")
    check_cuts(AdamW(), (8, 6), cut, "w")
    with pytest.raises(RecipeError, match=r"w is sharded over parallel.dp_shard; remove offload"):
        check_cuts(AdamW(offload_state=True), (8, 6), cut, "w")


def test_a_run_on_a_cpu_says_that_its_state_is_there_anyway(caplog):
    with caplog.at_level("INFO"):
        made = TrainedParameters(AdamW(offload_state=True), {"w": weight(torch.float32)})
    assert "offload_state moves nothing, which saves no memory" in caplog.text
    assert isinstance(made.optimizer, torch.optim.AdamW)
