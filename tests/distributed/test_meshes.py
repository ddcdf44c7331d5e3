"""Any mesh learns what one process learns: loss, gradients, their norm, and the weights after it.

In float64, where only the order of sums differs, so that a wrong sum of any weight shows.
"""

import itertools
import math
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

import ranks
import small
from kept import assert_bitwise, everything
from spread import UNEVEN, learn, resume, save, trainer
from surefoot.checkpoint.verification import verify
from surefoot.methods import OFT, Freeze, Full, LoRA, VeRA
from surefoot.model.numerics import seed_everything
from surefoot.parallel.world import ALONE

CLOSE = 1e-9  # of float64 after some steps of Adam
CLOSE_FLOAT32 = 5e-5
STEPS = 3
AXES = ("pp", "dp_replicate", "dp_shard", "tp")
METHODS = {"full": Full(), "lora": LoRA(rank=3, alpha=8.0)}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
OTHERS = {
    "attention": LoRA(rank=3, targets=ATTENTION),
    "rslora, A frozen": LoRA(rank=3, rslora=True, freeze_a=True),
    "head saved": LoRA(rank=3, modules_to_save=("lm_head", "norm")),
    "embeddings saved": LoRA(rank=3, modules_to_save=("embed_tokens", "lm_head")),
    "freeze": Freeze(num_layers=2),
}
WITHOUT_TP = {  # refused with it
    "dora": LoRA(rank=3, dora=True),
    "adapted embeddings": LoRA(rank=3, targets=("embed_tokens",)),
    "vera": VeRA(),
    "oft": OFT(),
}
EVERY = {**METHODS, **OTHERS, **WITHOUT_TP}
# 24 examples a step are divided evenly among 1, 2, 3, 4, 6 and 8 processes; 8 heads among 8.
SIZES = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
SIZES |= {"num_hidden_layers": 4, **UNEVEN}
SIZES |= {"train": {"global_batch_size": 24, "micro_batch_size": 1}, "kind": "qwen2"}
DOUBLE = {"dtype": torch.float64, **SIZES}
DEEP = {**DOUBLE, "num_hidden_layers": 8}  # among 8 as well


def meshes(size):
    """Every mesh of so many processes; ``tp`` divides the heads."""
    for sizes in itertools.product(range(1, size + 1), repeat=len(AXES)):
        found = dict(zip(AXES, sizes, strict=True))
        if math.prod(sizes) == size and 8 % found["tp"] == 0:
            yield found


ALL = [mesh for size in (2, 3, 4, 6, 8) for mesh in meshes(size)]
# Each with one method and few rows; the proof below has every mesh with every method.
FEW = {**DOUBLE, "train": {"global_batch_size": 8, "micro_batch_size": 1}}
SOME = [
    ({"dp_replicate": 2, "dp_shard": 2}, "full"),
    ({"dp_shard": 2, "tp": 2}, "lora"),
    ({"pp": 3}, "lora"),
]
CHAIN = [  # 8, 4, 1, 2 and 8 processes
    {"pp": 2, "dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    {"dp_shard": 4},
    {"pp": 4},
    {},
    {"tp": 2},
    {"pp": 2},
    {"dp_replicate": 4, "tp": 2},
    {"pp": 2, "dp_replicate": 2, "dp_shard": 2},
    {"dp_shard": 8},
]
OF_EACH_AXIS = [{"dp_replicate": 4}, {"dp_shard": 4}, {"tp": 2}, {"pp": 2, "dp_shard": 2}]
OF_EACH_AXIS += [{"dp_shard": 2, "tp": 2}, {"pp": 2, "tp": 2}]
CHAIN_OF_FEW = [{"dp_shard": 2, "tp": 2}, {"pp": 2}, {}, {"dp_replicate": 2}]


def name_of(mesh):
    return "x".join(f"{axis}{size}" for axis, size in mesh.items() if size > 1) or "alone"


def each_rank(mesh, work):
    """What ``work(world)`` returns, which is the same in every process of the mesh."""
    found = ranks.run(math.prod(mesh.values()), work, timeout=240, **mesh)
    assert all(one == found[0] for one in found), "all ranks must say the same"
    return found[0]


def together(mesh, work):
    """The same of what a stage of a pipeline has only a part of: all of it, by kind and name."""
    whole = {}
    for one in ranks.run(math.prod(mesh.values()), work, timeout=240, **mesh):
        for kind, values in one.items():
            named = whole.setdefault(kind, {})
            for name in named.keys() & values.keys():
                assert named[name] == values[name], f"all ranks must say the same: {name}"
            named |= values
    return whole


def whole(tensor):
    """All numbers of it, to be compared and sent."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().double().flatten().tolist()


def gradients(made):
    """Of the next window, by name; nothing is learnt from them."""
    state, loader = made.windows.loader.state_dict(), made.windows.loader
    made.policy.module.train()
    made.policy.step.gradients(
        loader.next_window(),
        partial(made.stage.loss, "policy"),
        step=made.state.global_step,
        before=lambda index: seed_everything(0, 0, index, made.world.data_rank),
        after=lambda index: None,
    )
    found = {}
    for group in made.policy.step.optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            found[name] = whole(parameter.grad)
    made.policy.step.optimizer.zero_grad(set_to_none=True)
    loader.load_state_dict(state)
    return found


def outcome(world, folder, method, sizes):
    """Gradients of the first step, loss and norm of each, weights after the last."""
    made = trainer(world, folder, method=EVERY[method], **sizes)
    first, losses = gradients(made), learn(made, STEPS)
    held = {name: t for name, t in made.policy.weights.state_dict().items() if not t.is_meta}
    weights = {name: whole(tensor) for name, tensor in held.items()}
    return {"gradients": first, "losses": {"all": [*itertools.chain(*losses)]}, "weights": weights}


@cache
def alone(method, deep):
    """The outcome in one process, which saves nothing."""
    return outcome(ALONE, Path("unused"), method, DEEP if deep else FEW)


def compare(found, expected):
    """The largest difference."""
    worst = 0.0
    for kind, values in expected.items():
        assert found[kind].keys() == values.keys()
        for name, numbers in values.items():
            ours, theirs = torch.tensor([found[kind][name], numbers], dtype=torch.float64)
            torch.testing.assert_close(ours, theirs, rtol=CLOSE, atol=CLOSE, msg=f"{kind}: {name}")
            worst = max(worst, float((ours - theirs).abs().max()) if len(ours) else 0.0)
    return worst


@pytest.mark.parametrize(("mesh", "method"), SOME, ids=str)
def test_a_mesh_learns_what_one_process_learns(mesh, method, tmp_path):
    found = together(mesh, lambda world: outcome(world, tmp_path, method, FEW))
    compare(found, alone(method, deep=False))


@pytest.mark.proof
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mesh", ALL, ids=name_of)
def test_every_mesh_learns_what_one_process_learns(mesh, method, tmp_path):
    found = together(mesh, lambda world: outcome(world, tmp_path, method, DEEP))
    print(f"\nfigures: {name_of(mesh)} {method}: {compare(found, alone(method, deep=True)):.1e}")


@pytest.mark.proof
@pytest.mark.parametrize("method", EVERY)
def test_every_method_learns_the_same_on_meshes_of_each_axis(method, tmp_path):
    """Half of the rows have no labels, and so have all of some rank."""
    items = small.examples(24)
    for item in items[::2]:
        item["labels"] = [-100] * len(item["labels"])
    sizes = {**DEEP, "examples": items}
    expected = outcome(ALONE, tmp_path, method, sizes)
    for mesh in OF_EACH_AXIS:
        if mesh.get("tp", 1) == 1 or method not in WITHOUT_TP:
            found = together(mesh, lambda world: outcome(world, tmp_path, method, sizes))
            print(f"\nfigures: {mesh} {method}: {compare(found, expected):.1e}")


def follow(chain, folder, steps=1, **changes):
    """A run whose mesh changes after every so many steps: loss and norm of each step."""
    path, losses = None, []

    def work(world):
        made = trainer(world, folder, **changes)
        if path is not None:
            resume(made, path)
        more = learn(made, steps)
        return save(made, folder), more

    for mesh in chain:
        path, more = each_rank(mesh, work)
        assert verify(path, full=True).ok
        losses += more
    return losses


def furthest(ours, theirs, close):
    assert len(ours) == len(theirs)
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one == pytest.approx(other, abs=close, rel=close), f"step {step}"
    pairs = zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True)
    return max(abs(a - b) for a, b in pairs)


def test_a_run_may_change_its_mesh_after_every_step(tmp_path):
    alone = learn(trainer(ALONE, tmp_path, **FEW), len(CHAIN_OF_FEW))
    furthest(follow(CHAIN_OF_FEW, tmp_path, **FEW), alone, CLOSE)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.proof)], ids=str
)
def test_weights_and_moments_keep_their_precision(dtype, tmp_path):
    changes = {**SIZES, "dtype": dtype}
    made = trainer(ALONE, tmp_path, **changes)
    learn(made, 1)
    path, expected = save(made, tmp_path), everything(made)
    # those of bfloat16 weights are float32: their updates are rounded at random
    moments = {torch.bfloat16: torch.float32}.get(dtype, dtype)
    assert {tensor.dtype for name, tensor in expected.items() if "exp_avg" in name} == {moments}
    found = ranks.run(
        2, lambda world: everything(resume(trainer(world, tmp_path, **changes), path))
    )
    for one in found:
        assert_bitwise(one, expected)


@pytest.mark.proof
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("dtype", "kind", "close"),
    [
        (torch.float32, "qwen2", CLOSE_FLOAT32),
        # Its norms compute in the type of the weights. Those of the other round to float32, so
        # that a sum in another order may be another float: 1e-8 on some processors.
        (torch.float64, "starcoder2", 1e-12),
    ],
)
def test_from_8_to_4_to_1_to_2_to_8_processes(method, dtype, kind, close, tmp_path):
    changes = {**SIZES, "kind": kind, "method": METHODS[method], "dtype": dtype}
    alone = learn(trainer(ALONE, tmp_path, **changes), 2 * len(CHAIN))
    found = follow(CHAIN, tmp_path, steps=2, **changes)
    worst = furthest(found, alone, close)
    print(f"\nfigures: chain {method} {dtype}: {worst:.1e}")
