import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from surefoot.checkpoint.disk.folder import FolderWeights
from surefoot.checkpoint.sources import FolderSource, TensorsInMemory, described, read_whole
from surefoot.errors import CheckpointError
from surefoot.plugins.mindspore.opening import open_mindspore_state
from surefoot.plugins.mindspore.strategy import open_strategy
from surefoot.plugins.mindspore.tensor_layout import ParallelConfig
from surefoot.plugins.mindspore.writing import (
    Naming,
    write_distributed,
    write_full,
    write_iteration,
)

from .real import rank_file, read
from .test_opened import assert_true, every

CONFIGS = {
    "mp4": {"model_parallel": 4},
    "dp2mp2": {"data_parallel": 2, "model_parallel": 2},
    "pp2mp2": {"pipeline_stage": 2, "model_parallel": 2},
    "dp4_opt": {"data_parallel": 4, "enable_parallel_optimizer": True},
    "dp2mp2_opt": {"data_parallel": 2, "model_parallel": 2, "enable_parallel_optimizer": True},
    "w8_pp2dp2mp2_opt": {
        "data_parallel": 2,
        "model_parallel": 2,
        "pipeline_stage": 2,
        "enable_parallel_optimizer": True,
    },
}
RESHARDED = (
    "dp2mp2__to__mp4",
    "dp2mp2_opt__to__mp4",
    "dp4_opt__to__w8_pp2dp2mp2_opt",
    "mp4__to__dp2mp2",
    "mp4__to__pp2mp2",
    "pp2mp2__to__mp4",
    "w8_pp2dp2mp2_opt__to__pp2mp2",
)


def config(name):
    return ParallelConfig(**CONFIGS[name], parallel_optimizer_threshold=0)


def opened(folder):
    return FolderSource(FolderWeights("mindspore", folder, open_mindspore_state(folder)))


def stages(source, name):
    """As the real files were cut: the head by rows, the embedding not at all."""
    tensors = {n: one for n, one in described(source).items() if one[1] and n != "global_step"}
    return as_real(name, tensors)


def as_real(name, tensors):
    whole, cut = (replace(config(name), vocab_emb_dp=own).stages(tensors) for own in (True, False))
    return [
        {n: (other if "lm_head" in n else own)[n] for n in own}
        for own, other in zip(whole, cut, strict=True)
    ]


def assert_same_tensors(found, expected):
    """The same tensors, whatever their order in the files; what the headers say beside."""
    ours, metadata = read(found)
    theirs, other = read(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name
    return metadata, other


def assert_same_files(found, expected):
    metadata, other = assert_same_tensors(found, expected)
    assert metadata["format"] == other["format"]
    assert metadata.get("remove_redundancy") == other.get("remove_redundancy", "False")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_layout_of_a_parallel_config_is_the_one_mindspore_chose(real, truth, name):
    tensors = {n: ("F32", tuple(t.shape)) for n, t in truth.items()}
    found = as_real(name, tensors)
    expected = open_strategy(real / name / "strategy").stages
    for own, theirs in zip(found, expected, strict=True):
        told = {n: one for n, one in theirs.items() if not n.startswith("accu_grads")}
        assert own == told


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_for_a_config_is_what_the_ranks_saved(real, tmp_path, name):
    source = opened(real / "single/checkpoint")
    naming = Naming("llama", 2, 10)
    write_distributed(source, tmp_path / "out", stages=stages(source, name), naming=naming)
    for rank in range(config(name).world_size):
        assert_same_files(rank_file(tmp_path / "out", rank), rank_file(real / name, rank))
        meta = (tmp_path / f"out/checkpoint/rank_{rank}/meta.json").read_bytes()
        theirs = (real / name / f"checkpoint/rank_{rank}/meta.json").read_bytes()
        assert json.loads(meta) == json.loads(theirs)


@pytest.mark.parametrize("name", RESHARDED)
def test_one_strategy_becomes_another_as_mindspore_does_it(real, tmp_path, name):
    before, after = name.split("__to__")
    source = opened(real / before)
    told = open_strategy(real / after / "strategy").stages
    write_distributed(source, tmp_path / "out", stages=told)
    for path in sorted((real / "transformed" / name).rglob("*.safetensors")):
        rank = int(path.parent.name.removeprefix("rank_"))
        assert_same_files(rank_file(tmp_path / "out", rank), path)


def test_fewer_ranks_hold_wider_columns(real, truth, tmp_path):
    """Where MindSpore 2.10's own ``transform_checkpoints`` gives other values."""
    told = open_strategy(real / "mp2_bf16" / "strategy").stages
    write_distributed(opened(real / "mp4"), tmp_path / "out", stages=told)
    for name in ("attention.wo", "feed_forward.w2"):
        whole = truth[f"model.layers.0.{name}.weight"]
        for rank, expected in enumerate(whole.chunk(2, 1)):
            found, _ = read(rank_file(tmp_path / "out", rank))
            assert torch.equal(found[f"model.layers.0.{name}.weight"], expected)


@pytest.mark.parametrize("name", ["dp2mp2", "w8_pp2dp2mp2_opt", "mp2_bf16"])
def test_a_merge_is_what_mindspore_merges(real, tmp_path, name):
    write_full(opened(real / name), tmp_path / "out")
    for file in ("part0.safetensors", "hyper_param.safetensors"):
        assert_same_tensors(tmp_path / "out" / file, real / name / "unified" / file)
    ours, theirs = (
        json.loads((folder / "param_name_map.json").read_text())
        for folder in (tmp_path / "out", real / name / "unified")
    )
    assert ours == theirs


def test_large_models_lie_in_several_parts(real, truth, tmp_path):
    write_full(opened(real / "mp4"), tmp_path / "out", part_size=20_000)
    assert len(list((tmp_path / "out").glob("part*.safetensors"))) == 4
    found = opened(tmp_path / "out")
    assert all(torch.equal(read_whole(found, name), tensor) for name, tensor in truth.items())


def test_of_equal_slices_one_is_written(real, truth, tmp_path):
    source = opened(real / "mp4")
    told = stages(source, "dp2mp2")
    write_distributed(source, tmp_path / "out", stages=told, remove_redundancy=True)
    files = [load_file(rank_file(tmp_path / "out", rank)) for rank in range(4)]
    own = [sum(t.nbytes for n, t in file.items() if n in truth) for file in files]
    assert sum(own) == sum(tensor.nbytes for tensor in truth.values())
    assert max(own) <= 1.2 * sum(own) / 4
    assert all("step_num" in file for file in files)
    assert read(rank_file(tmp_path / "out", 0))[1]["remove_redundancy"] == "True"
    found = opened(tmp_path / "out")
    assert all(torch.equal(read_whole(found, name), tensor) for name, tensor in truth.items())


def test_what_was_written_is_read_back_with_its_own_strategy(real, truth, tmp_path):
    source = opened(real / "dp4_opt")
    write_distributed(source, tmp_path / "out", stages=stages(source, "w8_pp2dp2mp2_opt"))
    found = opened(tmp_path / "out")
    assert all(torch.equal(read_whole(found, name), tensor) for name, tensor in truth.items())


def test_a_tensor_without_a_layout_is_refused_and_nothing_written(tmp_path):
    source = TensorsInMemory({"a.weight": torch.ones(4, 4), "b.weight": torch.ones(4, 4)})
    told = ParallelConfig(2).stages({"a.weight": ("F32", (4, 4))})
    with pytest.raises(CheckpointError, match=r"the strategy does not contain 'b.weight'"):
        write_distributed(source, tmp_path / "out", stages=told)
    assert not list(tmp_path.iterdir())


def test_small_tensors_are_not_sharded_by_the_optimizer():
    found = ParallelConfig(2, enable_parallel_optimizer=True)
    layouts = found.stages({"a.weight": ("F32", (128, 128)), "b.weight": ("F32", (128, 127))})[0]
    assert [layouts[name].num_shards for name in ("a.weight", "b.weight")] == [-1, 0]


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ({"model_parallel": 3}, "model_parallel=3: 'a.wq.weight' has 4 rows, which is no mult"),
        ({"pipeline_stage": 2}, "pipeline_stage=2: 1 layer cannot be divided evenly"),
        ({"data_parallel": 0}, "data_parallel must be at least 1, got 0"),
        ({"optimizer_weight_shard_size": 0}, "optimizer_weight_shard_size must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(told, problem):
    tensors = {"a.wq.weight": ("F32", (4, 4)), "model.layers.0.x.weight": ("F32", (4,))}
    with pytest.raises(CheckpointError, match=problem):
        ParallelConfig(**told).stages(tensors)


def test_how_experts_are_cut_is_left_to_the_strategy():
    tensors = {"decoder.layers.0.mlp.experts.weight1": ("F32", (4, 4))}
    assert ParallelConfig(2).stages(tensors)
    with pytest.raises(CheckpointError, match=r"the sharding of 'decoder.*' is not known"):
        ParallelConfig(1, 2).stages(tensors)


@pytest.mark.parametrize(("vocabulary", "parts"), [(4, 2), (5, 1)])
def test_the_head_is_cut_as_mindspore_transformers_does(vocabulary, parts):
    tensors = {"lm_head.weight": ("F32", (vocabulary, 4))}
    for vocab_emb_dp, count in ((True, 1), (False, parts)):
        (own,) = ParallelConfig(1, 2, vocab_emb_dp=vocab_emb_dp).stages(tensors)
        assert own["lm_head.weight"].counts(2) == (count, 1)


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
