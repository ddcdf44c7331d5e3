"""Folders of boxes in the convention of PyTorch's distributed checkpoints, in both directions."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

from surefoot.checkpoint.converting._resharding import reshard
from surefoot.checkpoint.converting.targets import write_dcp
from surefoot.checkpoint.float32_weights import none_kept
from surefoot.checkpoint.layouts.layout import file_name, shard_files
from surefoot.checkpoint.layouts.opening import open_folder
from surefoot.checkpoint.looking.summary import summarise
from surefoot.checkpoint.saving.preparation import save
from surefoot.checkpoint.sources import TensorsInMemory, cast, copy, read_whole
from surefoot.checkpoint.verification import verify
from surefoot.errors import CheckpointError
from surefoot.parallel.sharding import Mesh

from ..sample import same, sample_states

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning", "ignore:.*TypedStorage:UserWarning"
)
TENSORS = {
    "embed.weight": torch.randn(97, 6),  # 97 rows on 4 ranks: 25, 25, 25, 22
    "odd.weight": torch.randn(5, 4),  # 2, 2, 1, none
    "half.weight": torch.randn(9, 3).bfloat16(),
    "norm.weight": torch.randn(7),
    "scale": torch.tensor(2.5),
}


def everything(source):
    return {name: read_whole(source, name) for name in source.shapes()}


def read_by_pytorch(folder, tensors):
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return found


@pytest.mark.parametrize("mesh", [Mesh(1, 1), Mesh(1, 4), Mesh(2, 3), Mesh(1, 60)])
def test_pytorch_reads_what_is_written_for_any_mesh(mesh, tmp_path):
    write_dcp(TensorsInMemory(TENSORS), tmp_path / "dcp", mesh=mesh)
    assert same(read_by_pytorch(tmp_path / "dcp", TENSORS), TENSORS)
    assert same(dict(sorted(everything(open_folder(tmp_path / "dcp")).items())), by_name(TENSORS))


def by_name(tensors):
    return dict(sorted(tensors.items()))


def test_pytorch_makes_whole_tensors_of_it(tmp_path):
    write_dcp(TensorsInMemory(TENSORS), tmp_path / "dcp", mesh=Mesh(1, 4))
    (tmp_path / "whole").mkdir()
    mapping = dict.fromkeys(TENSORS, 1)
    consolidate_safetensors_files(
        str(tmp_path / "dcp"), str(tmp_path / "whole"), fqn_to_index_mapping=mapping
    )
    (file,) = (tmp_path / "whole").glob("*.safetensors")
    theirs = load_file(file)
    for name, tensor in TENSORS.items():  # of torch 2.13 every scalar comes out as 0
        assert not tensor.ndim or torch.equal(theirs[name], tensor)
    copy(open_folder(tmp_path / "dcp"), tmp_path / "ours")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert same(by_name(ours), by_name(TENSORS))


def test_the_boxes_of_our_own_ranks_are_read_by_pytorch_as_one(tmp_path):
    """The same with the files of layout distributed, uneven and with empty ranks."""
    path = save(tmp_path, 7, states := sample_states())
    cut = reshard(path, tmp_path / "cut", layout="distributed", mesh=Mesh(1, 7)).path
    flat = tmp_path / "flat"  # its reader looks into one folder
    flat.mkdir()
    for file in cut.glob("rank_*/model.safetensors"):
        (flat / f"{file_name(int(file.parent.name[5:]))}.safetensors").symlink_to(file)
    model = states["model"].state
    assert same(read_by_pytorch(flat, model), model)
    assert same(by_name(everything(open_folder(flat))), by_name(model))


def test_what_pytorch_wrote_is_read(tmp_path):
    writer = HuggingFaceStorageWriter(str(tmp_path / "dcp"), save_distributed=True)
    dcp.save(TENSORS, storage_writer=writer, no_dist=True)
    source = open_folder(tmp_path / "dcp")
    assert same(by_name(everything(source)), by_name(TENSORS))
    copy(source, tmp_path / "plain")
    assert same(by_name(load_file(tmp_path / "plain" / "model.safetensors")), by_name(TENSORS))


def test_weights_are_cast(tmp_path):
    source = cast(TensorsInMemory(TENSORS), "bfloat16", none_kept)
    write_dcp(source, tmp_path / "dcp", small={"a/b.json": b"{}"})
    found = everything(open_folder(tmp_path / "dcp"))
    assert all(torch.equal(found[name], t.bfloat16()) for name, t in TENSORS.items())
    assert (tmp_path / "dcp" / "a" / "b.json").read_bytes() == b"{}"


def test_it_can_be_shown_and_verified(tmp_path):
    write_dcp(TensorsInMemory(TENSORS), tmp_path / "dcp", mesh=Mesh(1, 4))
    assert verify(tmp_path / "dcp").ok
    summary = summarise(tmp_path / "dcp")
    assert summary.layout == "dcp"
    (group,) = summary.groups
    assert {tensor.name.removeprefix("model/") for tensor in group.tensors} == TENSORS.keys()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_missing_rank_is_told(rank, tmp_path):
    write_dcp(TensorsInMemory(TENSORS), tmp_path / "dcp", mesh=Mesh(1, 3))
    (tmp_path / "dcp" / f"{file_name(rank)}.safetensors").unlink()
    with pytest.raises(CheckpointError, match="file of a rank missing"):
        open_folder(tmp_path / "dcp")


def box(folder, rank, tensor, info):
    metadata = {"DCP_SHARDING_INFO": info if isinstance(info, str) else json.dumps(info)}
    save_file({"w": tensor}, folder / f"{file_name(rank)}.safetensors", metadata)


@pytest.mark.parametrize(
    ("info", "told"),
    [
        ("not json", "not valid JSON"),
        ("[1]", "expected a JSON object"),
        ({"w": 3}, "must have saved_offsets"),
        ({"w": {"saved_offsets": [0]}}, "expected sizes"),
        ({"w": {"saved_offsets": [-2, 0]}}, "expected sizes"),
        ({"w": {"saved_offsets": [True, 0]}}, "expected sizes"),
        ({"w": {"saved_offsets": [2**70, 0]}}, "expected sizes"),
        ({"w": {"saved_offsets": [1, 0]}}, "do not cover"),
        ({"w": {"saved_offsets": [2**62, 0]}}, "do not cover"),
        ({"w": {"saved_offsets": [2, 0], "shape": [3, 3]}}, "do not cover"),
        ({"w": {"saved_offsets": [2, 0], "shape": [9, 3]}}, "do not cover"),
        ({"w": {"saved_offsets": [2, 0], "shape": "x"}}, "expected sizes"),
    ],
)
def test_headers_are_not_believed(info, told, tmp_path):
    box(tmp_path, 0, torch.zeros(2, 3), {"w": {"saved_offsets": [0, 0]}})
    box(tmp_path, 1, torch.zeros(2, 3), info)
    with pytest.raises(CheckpointError, match=told):
        open_folder(tmp_path)


def test_boxes_that_contradict_each_other_are_refused(tmp_path):
    box(tmp_path, 0, torch.zeros(2, 3), {"w": {"saved_offsets": [0, 0]}})
    box(tmp_path, 1, torch.zeros(2, 3).half(), {"w": {"saved_offsets": [2, 0]}})
    with pytest.raises(CheckpointError, match="different types"):
        open_folder(tmp_path)


def test_of_equal_boxes_one_is_read(tmp_path):
    for rank in range(2):
        box(tmp_path, rank, torch.ones(2, 3), {"w": {"saved_offsets": [0, 0]}})
    assert torch.equal(read_whole(open_folder(tmp_path), "w"), torch.ones(2, 3))


def test_a_folder_without_such_files_is_none(tmp_path):
    assert shard_files(tmp_path) == []
    assert shard_files(tmp_path / "nowhere") == []
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert shard_files(tmp_path) == []


def test_a_failed_write_leaves_nothing(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="it exists already"):
        write_dcp(TensorsInMemory(TENSORS), tmp_path / "there")

    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_dcp(TensorsInMemory(TENSORS), tmp_path / "dcp", progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
