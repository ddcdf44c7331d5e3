"""Layout distributed: files of boxes that explain themselves, read as one whole by everything."""

import json
import shutil
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM

import tiny
from damage import flip
from surefoot.checkpoint.disk.folder import open_checkpoint
from surefoot.checkpoint.disk.tensorfile import plan_save
from surefoot.checkpoint.layouts.opening import open_folder
from surefoot.checkpoint.loading import load
from surefoot.checkpoint.looking.summary import summarise
from surefoot.checkpoint.saving._writing import Shard, write
from surefoot.checkpoint.saving.preparation import WriterGroup, prepare, save
from surefoot.checkpoint.sources import copy, read_whole
from surefoot.checkpoint.verification import ConcurrentCheck, verify
from surefoot.errors import CheckpointError
from surefoot.parallel.sharding import Box
from surefoot.storage.files import digest

from .sample import Holder, blank, same, sample_states


def saved(root, states=None, **options):
    states = states or sample_states()
    return save(root, 7, states, writers=WriterGroup("distributed"), **options), states


@dataclass
class Pieces:
    """The content of files that hold boxes of tensors."""

    tensors: dict  # role -> name -> whole tensor
    boxes: dict  # file -> key -> box

    def write(self, shard, file):
        hashes = {}
        file.write_at(0, shard.plan.head)
        for key, entry in shard.plan.header.entries.items():
            whole = self.tensors[shard.role][key]
            box = self.boxes[shard.plan.name][key]
            part = whole[box.slices_in(Box.whole(tuple(whole.shape)))].contiguous()
            data = part.reshape(-1).view(torch.uint8).numpy().tobytes()
            file.write_at(entry.offset, data)
            hashes[key] = digest(data)
        file.sync()
        return hashes

    def hash(self, shard, name):
        raise AssertionError("nothing to share with")


def saved_by_ranks(root, states, cut):
    """As several ranks would save: ``cut(shape)`` gives the boxes of each rank."""
    job, live = prepare(root, 7, states, writers=WriterGroup("distributed"))
    shards, boxes = [], {}
    for shard in job.shards:
        name = shard.plan.name.rpartition("/")[2].removesuffix(".safetensors")
        entries = shard.plan.header.entries
        by_rank = {}
        for key, entry in entries.items():
            for rank, box in enumerate(cut(entry.shape)):
                if box is not None:
                    by_rank.setdefault(rank, {})[key] = (entry.dtype, entry.shape, box)
        for rank, held in by_rank.items():
            described = {key: (dtype, box.shape) for key, (dtype, _, box) in held.items()}
            whole = {key: (shape, box) for key, (_, shape, box) in held.items()}
            (plan,) = plan_save(f"rank_{rank:05d}/{name}", described, None, boxes=whole)
            shards.append(Shard(shard.role, plan))
            boxes[plan.name] = {key: box for key, (_, box) in whole.items()}
    small = {n: data for n, data in job.small.items() if not n.endswith(".index.json")}
    return write(replace(job, shards=shards, small=small), Pieces(live.groups, boxes)).path


def halves(shape):
    """Two ranks: columns of matrices, rows of vectors, scalars on the first."""
    whole = Box.whole(shape)
    if not shape:
        return [whole]
    dim = len(shape) - 1
    at = shape[dim] // 2
    first, rest = list(shape), list(shape)
    first[dim], rest[dim] = at, shape[dim] - at
    start = [0] * len(shape)
    start[dim] = at
    return [Box(whole.start, tuple(first)), Box(tuple(start), tuple(rest))]


def test_what_was_saved_comes_back(tmp_path):
    path, states = saved(tmp_path)
    fresh = blank(states)
    load(path, fresh)
    assert all(same(fresh[name].state, states[name].state) for name in states)
    assert verify(path, full=True).ok
    manifest = open_checkpoint(path).manifest
    assert manifest.layout == "distributed"
    assert {name for name in manifest.files if name.endswith(".safetensors")} == {
        f"rank_00000/{stem}.safetensors" for stem in ("model", "optimizer", "state")
    }


def test_every_file_explains_itself(tmp_path):
    path, states = saved(tmp_path)
    for stem in ("model", "optimizer", "state"):
        with safe_open(path / f"rank_00000/{stem}.safetensors", "pt") as file:
            told = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            assert told.keys() == set(file.keys())
            for key in file.keys():  # noqa: SIM118 - it is no dict
                shape = file.get_slice(key).get_shape()
                assert told[key] == {"saved_offsets": [0] * len(shape), "shape": shape}
    assert load_file(path / "rank_00000/model.safetensors").keys() == states["model"].state.keys()


def test_every_flipped_byte_is_found(tmp_path):
    path, _ = saved(tmp_path)
    flip(path / "rank_00000" / "optimizer.safetensors", -5)
    report = verify(path, full=True)
    assert [problem for problem in report.problems if "rank_00000/optimizer" in problem]
    with pytest.raises(CheckpointError, match="has changed since it was saved"):
        load(path, blank(sample_states()))


def test_from_pretrained_opens_it_as_it_lies(tmp_path):
    model = tiny.model("llama")
    config = model.config.to_json_string().encode()
    states = {"model": Holder(dict(model.state_dict()))}
    path, _ = saved(tmp_path, states, companions={"config.json": config}, max_shard_size=20_000)
    assert len(list((path / "rank_00000").glob("model-*.safetensors"))) > 1
    opened = AutoModelForCausalLM.from_pretrained(path).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(opened[name], tensor), name


def test_an_adapter_stays_where_peft_looks_for_it(tmp_path):
    states = {"model": Holder({"base_model.x.lora_A.weight": torch.randn(2, 3)})}
    path = save(tmp_path, 1, states, kind="adapter", writers=WriterGroup("distributed"))
    assert (path / "adapter_model.safetensors").is_file()
    fresh = {"model": Holder({"base_model.x.lora_A.weight": torch.zeros(2, 3)})}
    load(path, fresh)
    assert same(fresh["model"].state, states["model"].state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_pytorch_reads_it(tmp_path):
    path, states = saved(tmp_path)
    model = states["model"].state
    found = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(path / "rank_00000")), no_dist=True)
    for name, tensor in model.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_pytorch_puts_the_boxes_of_several_ranks_together(tmp_path):
    states = sample_states()
    path = saved_by_ranks(tmp_path, states, halves)
    flat = tmp_path / "flat"  # its reader looks into one folder
    flat.mkdir()
    for rank in range(2):
        file = path / f"rank_{rank:05d}" / "model.safetensors"
        shutil.copy(file, flat / f"model-{rank}.safetensors")
    found = {name: torch.zeros_like(tensor) for name, tensor in states["model"].state.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(flat)), no_dist=True)
    for name, tensor in states["model"].state.items():
        assert torch.equal(found[name], tensor), name


def test_the_boxes_of_several_ranks_are_one_checkpoint(tmp_path):
    states = sample_states()
    path = saved_by_ranks(tmp_path, states, halves)
    assert verify(path, full=True).ok
    fresh = blank(states)
    load(path, fresh)
    assert all(same(fresh[name].state, states[name].state) for name in states)
    source = open_folder(path)
    for name, tensor in states["model"].state.items():
        assert source.shapes()[name] == tuple(tensor.shape)
        assert torch.equal(read_whole(source, name), tensor), name
    copy(source, tmp_path / "plain")
    copied = load_file(tmp_path / "plain" / "model.safetensors")
    assert same(dict(sorted(copied.items())), dict(sorted(states["model"].state.items())))
    (group,) = [group for group in summarise(path).groups if group.role == "model"]
    assert len(group.tensors) == len(states["model"].state)


def test_damage_in_one_part_is_found_by_the_source_that_reads_it(tmp_path):
    path = saved_by_ranks(tmp_path, sample_states(), halves)
    flip(path / "rank_00001" / "model.safetensors", -40)
    source = open_folder(path)
    with pytest.raises(CheckpointError, match=r"rank_00001/model.safetensors: .* is damaged"):
        for name in source.shapes():
            read_whole(source, name)


def test_several_ranks_share_the_check_and_one_of_them_finds_the_damage(tmp_path):
    folder = saved_by_ranks(tmp_path, sample_states(), halves)
    flip(folder / "rank_00001" / "model.safetensors")
    found = []
    for rank in range(3):
        with ConcurrentCheck([folder], rank=rank, num_ranks=3) as check:
            found.append(check.wait())
    (damage,) = [one for one in found if one is not None]
    assert "rank_00001/model.safetensors" in str(damage)


def test_a_lost_rank_is_said(tmp_path):
    path = saved_by_ranks(tmp_path, sample_states(), halves)
    shutil.rmtree(path / "rank_00001")
    assert not verify(path, full=False).ok
    with pytest.raises(CheckpointError, match="rank_00001"):
        load(path, blank(sample_states()))


@settings(max_examples=25)
@given(data=st.data())
def test_any_box_is_read_from_any_cut(data, tmp_path_factory):
    tensor = torch.arange(6 * 5 * 4).reshape(6, 5, 4)
    grid = [
        sorted({0, *data.draw(st.lists(st.integers(1, n - 1), max_size=2)), n}) for n in (6, 5, 4)
    ]
    parts = [
        Box((a, b, c), (x - a, y - b, z - c))
        for a, x in zip(grid[0], grid[0][1:], strict=False)
        for b, y in zip(grid[1], grid[1][1:], strict=False)
        for c, z in zip(grid[2], grid[2][1:], strict=False)
    ]
    root = tmp_path_factory.mktemp("cut")
    path = saved_by_ranks(root, {"model": Holder({"w": tensor})}, lambda _: parts)
    start = [data.draw(st.integers(0, n)) for n in tensor.shape]
    shape = [data.draw(st.integers(0, n - a)) for a, n in zip(start, tensor.shape, strict=True)]
    box = Box(tuple(start), tuple(shape))
    found = open_folder(path).read("w", box)
    assert torch.equal(found, tensor[box.slices_in(Box.whole(tuple(tensor.shape)))])
    fresh = {"model": Holder({"w": torch.zeros_like(tensor)})}
    load(path, fresh)
    assert torch.equal(fresh["model"].state["w"], tensor)


def test_unchanged_weights_are_shared_between_steps(tmp_path):
    states = sample_states()
    first, _ = saved(tmp_path, states)
    states["optimizer"].state["groups"] = [{"lr": 0.5}]
    job, live = prepare(tmp_path, 8, states, writers=WriterGroup("distributed"), parent=first.name)
    result = write(job, live)
    assert result.num_shared > 0
    assert verify(result.path, full=True).ok
