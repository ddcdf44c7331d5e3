import json

import pytest
import torch

from surefoot.checkpoint.sources.source import TensorsInMemory, read_whole
from surefoot.errors import CheckpointError
from surefoot.plugins.mindspore.parallel_config import ParallelConfig
from surefoot.plugins.mindspore.strategy import open_strategy
from surefoot.plugins.mindspore.writing import write_iteration

from .real import read
from .test_opened import assert_true, every
from .test_write import opened

INNER = "iteration_00000020"


def assert_same(found, expected):
    names = sorted(path.name for path in (expected / INNER).iterdir())
    assert sorted(path.name for path in (found / INNER).iterdir()) == names
    for name in names:
        ours, theirs = found / INNER / name, expected / INNER / name
        if name.endswith(".json"):
            assert json.loads(ours.read_text()) == json.loads(theirs.read_text())
            continue
        (own, metadata), (other, told) = read(ours), read(theirs)
        assert own.keys() == other.keys()
        assert metadata == told
        # the real files were made with the optimizer's counter at 0
        assert all(torch.equal(own[key], other[key]) for key in own if key != "global_step")
    tracker = "latest_checkpointed_iteration.txt"
    assert (found / tracker).read_text() == (expected / tracker).read_text()


def test_one_process_writes_what_mindspore_transformers_writes(real, tmp_path):
    write_iteration(opened(real / "mp4"), tmp_path / "out", prefix="llama")
    assert_same(tmp_path / "out", real / "ckpt2_single/checkpoint2")


def test_several_ranks_write_what_mindspore_transformers_writes(real, tmp_path):
    stages = open_strategy(real / "ckpt2_dp2mp2/strategy").stages
    write_iteration(opened(real / "mp4"), tmp_path / "out", stages=stages, prefix="llama")
    assert_same(tmp_path / "out", real / "ckpt2_dp2mp2/checkpoint2")


@pytest.mark.parametrize("name", ["dp4_opt", "dp2mp2_opt", "mp4", "pp2mp2", "w8_pp2dp2mp2_opt"])
@pytest.mark.parametrize("once", [False, True])
def test_any_layout_is_read_back(real, truth, tmp_path, name, once):
    stages = open_strategy(real / name / "strategy").stages
    write_iteration(
        opened(real / "single/checkpoint"),
        tmp_path / "out",
        stages=stages,
        remove_redundancy=once,
    )
    assert_true(every(tmp_path / "out"), truth)


def test_shards_of_the_optimizer_cut_the_first_dimension_after_the_model(real, tmp_path):
    stages = open_strategy(real / "dp2mp2_opt/strategy").stages
    write_iteration(opened(real / "mp4"), tmp_path / "out", stages=stages)
    told = json.loads((tmp_path / "out" / INNER / "metadata.json").read_text())
    one = told["state_dict_metadata"]["model.layers.0.attention.wq.weight"]
    assert one["layout"]["tensor_map"] == [[0, 1], -1]
    assert one["axis_fragmentations"] == [4, 1]


def test_a_stage_of_a_pipeline_has_ranks_of_its_own(real, tmp_path):
    stages = open_strategy(real / "pp2mp2/strategy").stages
    write_iteration(opened(real / "mp4"), tmp_path / "out", stages=stages)
    told = json.loads((tmp_path / "out" / INNER / "metadata.json").read_text())
    first, last = (
        told["state_dict_metadata"][f"model.layers.{i}.attention.wq.weight"] for i in range(2)
    )
    assert [one["layout"]["rank_list"] for one in (first, last)] == [[0, 1], [2, 3]]
    assert first["properties"]["replica_id"] == [0, 0]
    name = "('model.layers.1.attention.wq.weight', (1,))"
    file = "surefoot-model-0000003-0000004.safetensors"
    assert told["storage_data"][name] == [{"file_name": file, "storage_rank": 3, "rank_group": [3]}]


def test_shards_over_a_part_of_the_copies_are_refused(tmp_path):
    config = ParallelConfig(
        4, enable_parallel_optimizer=True, optimizer_weight_shard_size=2,
        parallel_optimizer_threshold=0,
    )  # fmt: skip
    stages = config.stages({"a.weight": ("F32", (8, 4))})
    problem = "2 shards over 4 replicas; this form only supports shards over all of them"
    with pytest.raises(CheckpointError, match=problem):
        write_iteration(
            TensorsInMemory({"a.weight": torch.ones(8, 4)}), tmp_path / "out", stages=stages
        )
    assert not list(tmp_path.iterdir())


def test_weights_alone_are_iteration_0(tmp_path):
    write_iteration(TensorsInMemory({"a.weight": torch.ones(8, 4)}), tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out/iteration_00000000").iterdir())
    assert names == ["common.json", "surefoot-model-0000000-0000001.safetensors"]
    assert torch.equal(read_whole(opened(tmp_path / "out"), "a.weight"), torch.ones(8, 4))
