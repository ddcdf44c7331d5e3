"""A save of 405 billion parameters on 16,384 ranks, planned as any save: how much there is."""

import math
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.checkpoint.disk.manifest import Manifest, Piece
from surefoot.checkpoint.saving import _grid_plan, preparation
from surefoot.checkpoint.saving.preparation import WriterGroup
from surefoot.errors import CheckpointError

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import manifest as benchmark

MESHES = [{"dp_shard": 16_384}, {"pp": 16, "dp_shard": 128, "tp": 8}]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_manifest_of_16384_ranks_is_small(mesh):
    found = benchmark.measured(mesh, 0)
    assert found["bytes"] < 10_000_000
    assert found["objects"] == 3 * 16_384 + 1  # weights, optimizer and hash list of each rank
    assert found["list"] < 500_000  # of 250 MB, with a hash for each 64 KiB


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_rank_sends_a_digest_to_the_others_and_its_rules_along_a_pipeline(mesh):
    rank, sent = benchmark.Rank(5, mesh), []
    group = benchmark.group_of(rank)
    answered = group.exchange

    def exchange(value):
        sent.append(len(pickle.dumps(value)))
        return answered(value)

    benchmark.planned(replace(group, exchange=exchange), rank.tensors())
    assert len(sent) == 1
    assert sent[0] < 200


@pytest.mark.parametrize(("size", "number"), [(16_384, 5), (8192, 8191)])
def test_a_rank_that_loads_reads_the_hash_lists_of_the_ranks_near_it(size, number):
    rank = benchmark.Rank(5, {"dp_shard": 16_384})
    grid = benchmark.planned(benchmark.group_of(rank), rank.tensors())[0].grid
    read = []

    def read_list(rank):
        read.append(rank)
        boxes = grid.boxes_of(rank)
        return {name: Piece(name, "F32", (), box, "", "", "") for name, box in boxes.items()}

    manifest = Manifest(
        step=1, kind="full", created="", versions={}, files={}, hashes={}, pieces=(), grid=grid
    )
    tensors = replace(manifest, read_list=read_list).by_tensor()
    for role, held in benchmark.Rank(number, {"dp_shard": size}).tensors().items():
        for name, tensor in held.items():
            near = [*tensors[f"{role}/{name}"].near(tensor.box)]
            assert sum(math.prod((p.box & tensor.box).shape) for p in near) == tensor.box.size
    assert len(read) <= 16  # 8 and 4 rows of the vocabulary for each, 4 and 2 of others
    assert size < 16_384 or read == [5]


def test_rules_are_for_more_than_64_ranks_of_one_mesh_in_folders():
    def group(layout, size, **mesh):
        return WriterGroup(layout, 0, size, mesh)

    assert preparation.uses_grid(group("distributed", 65, dp_shard=65))
    assert preparation.uses_grid(group("distributed", 128, pp=2, tp=64))
    assert not preparation.uses_grid(group("distributed", 64, dp_shard=64))
    assert not preparation.uses_grid(group("full", 65, dp_shard=65))
    assert not preparation.uses_grid(group("distributed", 65))
    assert not preparation.uses_grid(group("distributed", 65, dp_shard=5))


def test_tensors_of_one_name_that_differ_between_stages_are_refused():
    rules = [
        _grid_plan.ShardingRule("value/w", "F32", (2, shape), (), stage)
        for stage, shape in enumerate((3, 3, 4))
    ]
    assert _grid_plan.merged([rules[:1], rules[1:2]], {"pp": 2}).rules == rules[:1]
    with pytest.raises(CheckpointError, match="value/w: ranks have different tensors of that name"):
        _grid_plan.merged([rules[:1], rules[2:]], {"pp": 2})
