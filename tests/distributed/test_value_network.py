"""A value network beside the model: saved by any number of ranks, loaded on any other."""

import json

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

import ranks
from spread import writers
from surefoot.checkpoint.loading import load
from surefoot.checkpoint.saving.preparation import save
from surefoot.checkpoint.state.states import FileState, UnshardedState
from surefoot.checkpoint.verification import verify

SHAPES = {
    "model": {"model.layers.0.weight": (11, 6), "model.norm.weight": (7,)},
    "value": {"model.layers.0.weight": (13, 4), "score.weight": (1, 4), "score.bias": (1,)},
}


class Network:
    """Weights, or an optimizer state, of which each rank has some rows."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def rows(tensor, world):
    return (
        tensor
        if world.mesh is None
        else distribute_tensor(tensor, world.mesh["dp_shard"], [Shard(0)])
    )


def states(world, factor):
    """Both networks and their moments; with ``factor`` 0 what a resumed run has before it loads."""
    found = {}
    for role, shapes in SHAPES.items():
        whole = {
            name: (torch.arange(torch.Size(shape).numel()) + 1.0).reshape(shape) * factor
            for name, shape in shapes.items()
        }
        weights = {name: rows(tensor, world) for name, tensor in whole.items()}
        moments = {
            n: {"exp_avg": rows(t + 1, world), "step": torch.tensor(factor)}
            for n, t in whole.items()
        }
        optimizer = "optimizer" if role == "model" else f"{role}_optimizer"
        found[role] = FileState(UnshardedState(Network(weights)))
        found[optimizer] = FileState(UnshardedState(Network(moments)))
    return found


def leaves(state):
    return [t for v in state.values() for t in (v.values() if isinstance(v, dict) else [v])]


def write_from(count, root, layout):
    def work(world):
        path = save(root, 3, states(world, 2.0), writers=writers(world, layout))
        world.wait()
        return path

    mesh = {"dp_shard": count} if count > 1 else {}
    return ranks.run(count, work, **mesh)[0]


def is_loaded_on(count, folder):
    def work(world):
        fresh, expected = states(world, 0.0), states(world, 2.0)
        load(folder, fresh)
        pairs = [(fresh[n].state_dict(), expected[n].state_dict()) for n in expected]
        local = [
            tuple(t.to_local() if hasattr(t, "to_local") else t for t in both)
            for pair in pairs
            for both in zip(*map(leaves, pair), strict=True)
        ]
        return all(torch.equal(a, b) for a, b in local)

    mesh = {"dp_shard": count} if count > 1 else {}
    return all(ranks.run(count, work, **mesh))


@pytest.mark.parametrize("layout", ["full", "distributed"])
@pytest.mark.parametrize(
    ("writers", "readers"),
    [
        pytest.param(1, (2,), marks=pytest.mark.proof),
        (2, (1, 4)),
        pytest.param(4, (2,), marks=pytest.mark.proof),
    ],
    ids=str,
)
def test_any_ranks_load_what_any_ranks_saved(writers, readers, layout, tmp_path):
    folder = write_from(writers, tmp_path, layout)
    assert verify(folder, full=True).ok
    assert all(is_loaded_on(count, folder) for count in readers)


def test_ranks_write_the_files_of_one_process_and_share_the_work(tmp_path):
    one, four = write_from(1, tmp_path / "1", "full"), write_from(4, tmp_path / "4", "full")
    for name in ("model", "optimizer", "value", "value_optimizer"):
        file = f"{name}.safetensors"
        assert (one / file).read_bytes() == (four / file).read_bytes()
    boxes = write_from(4, tmp_path / "boxes", "distributed")
    manifest = json.loads((boxes / "manifest.json").read_text())
    assert {f"rank_0000{rank}/value.safetensors" for rank in range(4)} <= manifest["files"].keys()
