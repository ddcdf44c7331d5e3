"""Float8 products over sharded weights: as on one rank, and resumed to the bit."""

from importlib.util import find_spec

import pytest
import torch

import ranks
from project import Project, model_folder
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe import load
from test_bf16_ranks import trained


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sharded_weights_learn_as_whole_ones_and_resume_to_the_same_bits(precision, tmp_path):
    train = {"max_steps": 4, "global_batch_size": 4, "micro_batch_size": 2, "precision": precision}
    project = Project(
        tmp_path / "p",
        kind="qwen3",
        model={"float8": "rowwise"},
        method="full",
        train=train,
        checkpoint={"save_steps": 2},
    )
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    model_folder(project.folder / "model", "qwen3", **sizes)
    recipe = load(project.recipe, ["parallel.dp_shard=2", "parallel.num_processes=2"])
    first = tmp_path / "whole" / "checkpoint-2"

    def work(world):
        whole, total = trained(world, recipe, tmp_path / "whole")
        again, _ = trained(world, recipe, tmp_path / "again", first)
        assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
        return total

    found = ranks.run(2, work, dp_shard=2)
    _, expected = trained(ALONE, load(project.recipe), tmp_path / "alone")
    assert found[0] == pytest.approx(expected, rel=0.02)
