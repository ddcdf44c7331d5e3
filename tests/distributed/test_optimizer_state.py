"""Optimizer state that is not shaped like its parameters, over ranks; and who cannot have it."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ranks
import surefoot.checkpoint as ckpt
from spread import writers
from surefoot.checkpoint.state.states import FileState
from surefoot.errors import RecipeError
from surefoot.optim.optimizer import Optimizer
from surefoot.optim.state_tensor import SCALAR, StateTensor, reduced
from surefoot.optim.trained import TrainedParameters
from surefoot.parallel.sharding import AxisShard

SHAPES = {"a.weight": (5, 4), "b.weight": (6, 3)}
CUTS = {name: (AxisShard("dp_shard", 0),) for name in SHAPES}


class FactoredOptimizer(torch.optim.Optimizer):
    """Second moments as the product of a row and a column factor; no in-place tricks."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, squares = self.state[p], p.grad * p.grad
                rows = squares.mean(1, keepdim=True)
                columns = squares.mean(0, keepdim=True)
                if isinstance(columns, DTensor):
                    columns = columns.redistribute(placements=[Replicate()])
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["row"], state["column"] = rows, columns
                state["step"] += 1
                state["row"] = 0.5 * state["row"] + 0.5 * rows
                state["column"] = 0.5 * state["column"] + 0.5 * columns
                p.sub_(group["lr"] * p.grad / (state["row"] * state["column"] + 1e-3).pow(0.25))


@dataclass(frozen=True, kw_only=True)
class Factored(Optimizer):
    """Row and column factors, each sharded where its parameter is."""

    state_tensors: ClassVar = {"step": SCALAR, "row": reduced(-1), "column": reduced(-2)}

    def build(self, named, layouts=None):
        return FactoredOptimizer(self.groups(named, {}), self.learning_rate)


class Unshardable(Factored):
    """The same, if it could not."""

    state_tensors: ClassVar = {
        **Factored.state_tensors,
        "column": StateTensor(lambda shape: shape, None),
    }


def made(world, optim=None):
    torch.manual_seed(0)
    named = {name: torch.randn(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    if world.size > 1:
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp_shard",))
        named = {name: distribute_tensor(p, mesh, [Shard(0)]) for name, p in named.items()}
    named = {name: torch.nn.Parameter(p) for name, p in named.items()}
    return TrainedParameters(
        optim or Factored(learning_rate=0.1), named, cuts=CUTS if world.size > 1 else {}
    )


def train(trained, steps):
    for step in steps:
        for p in trained.named.values():
            p.grad = torch.sin(p.detach() * (step + 1))
        trained.at(step).step()


def weights(trained):
    full = {n: p.detach() for n, p in trained.named.items()}
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for n, p in full.items()}


class Weights(dict):
    def state_dict(self):
        return {name: p.detach() for name, p in self.items()}

    def cuts_of(self, name):
        return CUTS[name] if isinstance(self[name], DTensor) else None

    def load_state_dict(self, state):
        with torch.no_grad():
            for name, p in self.items():
                p.copy_(state[name])


def save(world, trained, folder, step, layout):
    states = {"model": Weights(trained.named), "optimizer": FileState(trained)}
    path = ckpt.save(folder, step, states, writers=writers(world, layout))
    world.wait()
    return path


def resumed(world, folder):
    trained = made(world)
    ckpt.load(folder, {"model": Weights(trained.named), "optimizer": FileState(trained)})
    train(trained, range(2, 4))
    return weights(trained)


@pytest.mark.parametrize("layout", ["full", pytest.param("distributed", marks=pytest.mark.proof)])
def test_factors_of_two_ranks_are_saved_and_resharded(layout, tmp_path):
    def work(world):
        trained = made(world)
        train(trained, range(2))
        folder = save(world, trained, tmp_path / layout, 2, layout)
        train(trained, range(2, 4))
        return weights(trained), resumed(world, folder), str(folder)

    (expected, again, folder), (_, other, _) = ranks.run(2, work)
    alone = resumed(ranks.ALONE, folder)
    for name, tensor in expected.items():
        assert torch.equal(again[name], tensor) and torch.equal(other[name], tensor)
        torch.testing.assert_close(alone[name], tensor, rtol=1e-12, atol=1e-12)
    if layout == "full":
        stored = load_file(f"{folder}/optimizer.safetensors")
        assert stored["a.weight.row"].shape == (5, 1) and stored["b.weight.column"].shape == (1, 3)


def test_factors_of_one_rank_go_on_over_two(tmp_path):
    trained = made(ranks.ALONE)
    train(trained, range(2))
    states = {"model": Weights(trained.named), "optimizer": FileState(trained)}
    folder = ckpt.save(tmp_path, 2, states)
    train(trained, range(2, 4))
    for found in ranks.run(2, lambda world: resumed(world, folder)):
        for name, tensor in weights(trained).items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)


def test_what_cannot_be_sharded_is_refused_before_the_first_step():
    def work(world):
        with pytest.raises(RecipeError, match=r"Unshardable.*column.*parallel\.dp_shard"):
            made(world, Unshardable())
        return True

    assert ranks.run(2, work) == [True, True]
    made(ranks.ALONE, Unshardable())
