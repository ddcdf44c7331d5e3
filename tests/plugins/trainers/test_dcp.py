"""Distributed checkpoints that PyTorch wrote from several processes, pickled index and all."""

import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import warm
from checkpoint.sample import num_open, same
from surefoot.checkpoint.layouts.opening import open_any
from surefoot.checkpoint.sources import copy, read_whole
from surefoot.errors import CheckpointError
from surefoot.parallel.sharding import Box

SIZE = 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What three ranks saved, and the same model whole."""
    folder = tmp_path_factory.mktemp("dcp")
    script = Path(__file__).with_name("dcp_ranks.py")
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    ranks = [
        warm.Popen([sys.executable, script, str(rank), str(SIZE), folder], env=environment)
        for rank in range(SIZE)
    ]
    assert [rank.wait(120) for rank in ranks] == [0] * SIZE
    return folder


def by_name(tensors):
    return dict(sorted(tensors.items()))


@pytest.fixture(scope="module")
def whole(saved):
    return by_name(load_file(saved / "whole" / "model.safetensors"))


@pytest.mark.parametrize("name", ["plain", "both", "checkpoint-3", "safetensors"])
def test_what_several_ranks_saved_is_put_together(name, saved, whole, tmp_path):
    source = open_any(saved / name, trust_pickle=name != "safetensors")
    assert same(by_name({n: read_whole(source, n) for n in source.shapes()}), whole)
    copy(source, tmp_path)
    assert same(by_name(load_file(tmp_path / "model.safetensors")), whole)


def test_a_box_is_read_from_the_ranks_that_hold_it(saved, whole):
    source = open_any(saved / "plain", trust_pickle=True)
    box = Box((19, 3), (25, 7))  # of all three
    expected = whole["model.embed_tokens.weight"][19:44, 3:10]
    assert torch.equal(source.read("model.embed_tokens.weight", box), expected)
    assert source.dtypes()["model.embed_tokens.weight"] == torch.float32
    assert source.read("model.embed_tokens.weight", Box((2, 0), (0, 4))).shape == (0, 4)


def test_a_box_is_read_without_the_parts_of_other_ranks(saved, whole, tmp_path):
    """So that memory holds a part at a time, however large the tensor is."""
    shutil.copytree(saved / "plain", tmp_path / "plain")
    source = open_any(tmp_path / "plain", trust_pickle=True)
    for file in (tmp_path / "plain").glob("__[12]_*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    name, rows = "model.embed_tokens.weight", Box((0, 0), (21, 5))
    assert torch.equal(source.read(name, rows), whole[name][:21, :5])
    with pytest.raises(CheckpointError, match="damaged"):
        source.read(name, Box((0, 0), (22, 5)))


@pytest.mark.parametrize("name", ["plain", "checkpoint-3"])
def test_pickles_are_read_on_the_users_word_only(name, saved):
    with pytest.raises(CheckpointError, match="--trust-pickle") as error:
        open_any(saved / name)
    assert "\n" not in str(error.value)


@pytest.fixture
def small(tmp_path):
    """A folder of one process, to be damaged."""
    tensors = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.rand(4) > 0.5, "n": torch.empty(0)}
    dcp.save(tensors, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Evil:
    def __reduce__(self):
        return os.system, ("touch surefoot-was-here",)


@pytest.mark.parametrize(
    "content",
    [pickle.dumps(Evil()), b"", b"junk", pickle.dumps([1]), pickle.dumps({"a": 1}), b"\x80\x04N."],
    ids=["code", "empty", "junk", "list", "dict", "none"],
)
def test_an_index_that_is_none_runs_nothing_and_is_refused(content, small):
    (small / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata") as error:
        open_any(small, trust_pickle=True)
    assert "\n" not in str(error.value)
    assert not Path("surefoot-was-here").exists()


def test_the_pickle_around_a_tensor_runs_nothing(small):
    (file,) = small.glob("*.distcp")
    data = file.read_bytes()
    assert data.count(b"ctorch._utils\n_rebuild_tensor_v2") == 3
    evil = data.replace(b"ctorch._utils\n_rebuild_tensor_v2", b"ctorch.hub\nload_state_dict_from_")
    file.write_bytes(evil)
    source = open_any(small, trust_pickle=True)
    with pytest.raises(CheckpointError, match="nothing in it was executed"):
        read_whole(source, "w")


@pytest.mark.parametrize("keep", [0, 10, 500, 1000])
def test_a_truncated_file_is_told(keep, small):
    (file,) = small.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="it ends before the tensors"):
        open_any(small, trust_pickle=True)


def test_every_flipped_byte_of_the_index_is_harmless(small):
    """It may still mean the same, or something else that is whole; but nothing else happens."""
    index = small / ".metadata"
    data = index.read_bytes()
    before = num_open()
    for at in range(0, len(data), 7):
        index.write_bytes(data[:at] + bytes([data[at] ^ 0x15]) + data[at + 1 :])
        try:
            source = open_any(small, trust_pickle=True)
            [read_whole(source, name) for name, shape in source.shapes().items() if len(shape) < 9]
        except CheckpointError:
            pass
        source = None
    assert num_open() <= before + 1


def test_a_file_elsewhere_is_not_opened(small):
    index = small / ".metadata"
    data = index.read_bytes()
    assert data.count(b"__0_0.distcp") == 1
    index.write_bytes(data.replace(b"__0_0.distcp", b"../../passwd"))
    with pytest.raises(CheckpointError, match="is not a file in this folder"):
        open_any(small, trust_pickle=True)


def test_a_lost_file_is_told(small):
    (file,) = small.glob("*.distcp")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        open_any(small, trust_pickle=True)


def test_tensors_in_another_order_are_read_in_theirs(tmp_path):
    tensor = torch.randn(3, 4).t()
    dcp.save({"w": tensor}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(read_whole(open_any(tmp_path, trust_pickle=True), "w"), tensor)


def test_a_checkpoint_without_weights_is_told(tmp_path):
    dcp.save({"optimizer": {"a": torch.ones(2)}}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match="it contains no weights"):
        open_any(tmp_path, trust_pickle=True)
