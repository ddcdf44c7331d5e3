"""bfloat16 weights on several ranks: resumed to the bit, and on other ranks."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

import ranks
from project import Project
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe import load
from surefoot.run.assembly import build

MESHES = [{"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 1}, {"tp": 2}, {"pp": 2}]
FEW = [("master", MESHES[0])]
MANY = [(m, p) for m in ("stochastic", "master") for p in MESHES if (m, p) not in FEW]
CASES = [*FEW, *(pytest.param(*case, marks=pytest.mark.proof) for case in MANY)]


def trained(world, recipe, run, resume=None):
    """The weights and states of this rank after a run, and its losses."""
    recipe = replace(recipe, train=replace(recipe.train, output_dir=run))
    made = build(recipe, world=world, resume=resume)
    made.fit()
    states = made.policy.trained.state_dict()
    found = dict(made.policy.network.named)
    found |= {f"{n}.{k}": t for n, state in states.items() for k, t in state.items()}
    plain = {n: (t.to_local() if isinstance(t, DTensor) else t) for n, t in found.items()}
    return {n: t.detach().clone() for n, t in plain.items()}, made.state.train_loss_total


@pytest.mark.parametrize(("mode", "parallel"), CASES, ids=str)
def test_two_ranks_learn_as_one_and_resume_to_the_same_bits(mode, parallel, tmp_path):
    project = Project(
        tmp_path / "p",
        model={"dtype": "bfloat16"},
        optim={"adamw": {"learning_rate": 0.003, "bf16_weights": mode}},
        train={"max_steps": 4, "global_batch_size": 4, "micro_batch_size": 2},
        checkpoint={"save_steps": 2},
    )
    several = [f"parallel.{name}={size}" for name, size in parallel.items()]
    recipe = load(project.recipe, [*several, "parallel.num_processes=2"])
    first = tmp_path / "whole" / "checkpoint-2"

    def work(world):
        whole, total = trained(world, recipe, tmp_path / "whole")
        again, _ = trained(world, recipe, tmp_path / "again", first)
        assert whole.keys() == again.keys()
        assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
        return whole, total

    found = ranks.run(2, work, **parallel)
    if parallel.get("dp_replicate"):
        one, other = (weights for weights, _ in found)
        assert all(torch.equal(one[name], other[name]) for name in one)
    alone, expected = trained(ALONE, load(project.recipe), tmp_path / "alone")
    assert found[0][1] == pytest.approx(expected, rel=0.01)
    resumed, _ = trained(ALONE, load(project.recipe), tmp_path / "fewer", first)
    assert resumed.keys() == alone.keys()
