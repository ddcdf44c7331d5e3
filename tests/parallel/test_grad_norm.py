"""The norm of spread gradients is that of the whole ones."""

import math

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ranks
from surefoot.parallel.sharded_model import global_norm


def whole():
    torch.manual_seed(0)
    return [torch.randn(7, 3, dtype=torch.float64), torch.randn(1, dtype=torch.float64)]


def spread(world):
    same = [Replicate(), Replicate()]  # along pp and dp_replicate
    cuts = ([*same, Shard(0), Shard(1)], [*same, Replicate(), Shard(0)])
    gradients = [
        distribute_tensor(tensor, world.mesh, placements, src_data_rank=None)
        for tensor, placements in zip(whole(), cuts, strict=True)
    ]
    return float(global_norm(gradients, world.totals, torch.device("cpu")))


def test_parts_and_copies_of_parts_count_once():
    expected = math.sqrt(sum(float(tensor.square().sum()) for tensor in whole()))
    for found in ranks.run(4, spread, tp=2, dp_replicate=2):
        assert math.isclose(found, expected, rel_tol=1e-14)


def test_plain_gradients_are_torch_s_business():
    gradients = whole()
    found = global_norm(gradients, torch.clone, torch.device("cpu"))
    assert found == torch.nn.utils.get_total_norm(gradients)
