"""A checkpoint in another layout or for another mesh is the same checkpoint."""

import errno
import json
import os
import resource
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from counting import Counting
from crash.system import But, refusing
from damage import flip
from surefoot.checkpoint.converting._resharding import reshard
from surefoot.checkpoint.disk.folder import open_checkpoint
from surefoot.checkpoint.loading import load
from surefoot.checkpoint.saving.preparation import save
from surefoot.checkpoint.verification import verify
from surefoot.errors import CheckpointError, DamagedFileError
from surefoot.parallel.sharding import Mesh
from surefoot.storage import files

from ..sample import Holder, blank, num_open, same, sample_states, tree_bytes
from ..test_distributed import halves, saved_by_ranks

CONFIG = b'{"dtype": "float32", "model_type": "llama"}'


def saved(root, states=None, **options):
    states = states or sample_states(scale=3)
    options = {"companions": {"config.json": CONFIG, "recipe.yaml": b"a: 1"}, **options}
    return save(root, 7, states, **options), states


def loaded(path, states):
    fresh = blank(states)
    load(path, fresh)
    return all(same(fresh[name].state, states[name].state) for name in states)


def content(folder):
    """All but the manifest, which says when it was written."""
    return {name: data for name, data in tree_bytes(folder).items() if name != "manifest.json"}


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(1, 1),
        Mesh(1, 3),
        Mesh(2, 2),
        Mesh(3, 5),
        pytest.param(Mesh(1, 64), marks=pytest.mark.proof),
        Mesh(2, 2, 2),
    ],
)
def test_there_and_back_gives_the_same_bytes(mesh, tmp_path):
    path, states = saved(tmp_path)
    cut = reshard(path, tmp_path / "cut", layout="distributed", mesh=mesh).path
    assert verify(cut, full=True).ok
    assert loaded(cut, states)
    manifest = open_checkpoint(cut).manifest
    assert (manifest.layout, manifest.step, manifest.world_size) == ("distributed", 7, mesh.size)
    assert manifest.mesh == mesh.axes
    back = reshard(cut, tmp_path / "back").path
    assert verify(back, full=True).ok
    assert content(back) == content(path)


@pytest.mark.parametrize("count", [4, pytest.param(30, marks=pytest.mark.proof)])
def test_any_mesh_becomes_any_other(count, tmp_path_factory):
    sizes = st.integers(1, 6)
    meshes = st.builds(Mesh, sizes, sizes, st.integers(1, 3))

    @settings(max_examples=count)
    @given(st.lists(meshes, min_size=3, max_size=3))
    def check(chain):
        root = tmp_path_factory.mktemp("any")
        path, states = saved(root)
        for number, mesh in enumerate(chain):
            path = reshard(path, root / str(number), layout="distributed", mesh=mesh).path
            assert loaded(path, states)
        assert content(reshard(path, root / "full").path) == content(root / "checkpoint-7")

    check()


def test_copies_are_written_once_and_spread(tmp_path):
    model = {f"layers.{i}.weight": torch.randn(8, 16) for i in range(40)}
    path, _ = saved(tmp_path, {"model": Holder(model)})
    mesh = Mesh(4, 2)
    reshard(path, tmp_path / "cut", layout="distributed", mesh=mesh)
    pieces = open_checkpoint(tmp_path / "cut").manifest.pieces
    assert sum(piece.num_bytes for piece in pieces) == 40 * 8 * 16 * 4
    sizes = [
        sum(p.num_bytes for p in pieces if p.file.startswith(f"rank_{r:05d}")) for r in range(8)
    ]
    assert max(sizes) <= 1.1 * sum(sizes) / len(sizes)


def test_every_byte_is_read_once_or_again_where_it_is_read_out_of_order(tmp_path, monkeypatch):
    path, _ = saved(tmp_path, sample_states(scale=20_000))  # 17 MB
    cut = reshard(path, tmp_path / "cut", layout="distributed", mesh=Mesh(1, 7)).path
    needed = sum(piece.num_bytes for piece in open_checkpoint(cut).manifest.pieces)
    monkeypatch.setattr(files, "os", counting := Counting())
    for source, target, most, options in (
        (cut, "full", 1.02, {}),
        (cut, "other", 2.02, {"layout": "distributed", "mesh": Mesh(2, 4)}),
        (path, "again", 1.02, {"layout": "distributed", "mesh": Mesh(1, 3)}),
    ):
        counting.count = 0
        reshard(source, tmp_path / target, **options)
        assert needed <= counting.count <= most * needed, target


PEAK = """
import resource, sys
from surefoot.checkpoint import Mesh, reshard
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small, large, target = sys.argv[1:]
reshard(small, target + "-a"); reshard(small, target + "-b", layout="distributed", mesh=Mesh(1, 3))
before = peak()
reshard(large, target + "-c"); reshard(large, target + "-d", layout="distributed", mesh=Mesh(1, 3))
print(peak() - before)
"""


@pytest.mark.proof
@pytest.mark.skipif(sys.platform != "linux", reason="memory is told in KiB on Linux")
def test_memory_does_not_grow_with_the_model(tmp_path):
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    small, _ = saved(tmp_path / "small")
    whole, _ = saved(tmp_path / "whole", {"model": Holder({"w": torch.ones(8192, 4096)})})
    large = reshard(whole, tmp_path / "large", layout="distributed", mesh=Mesh(1, 8)).path
    command = [sys.executable, "-c", PEAK, small, large, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 32 << 10  # KiB; the tensor has 128 MiB, each box 16


def test_weights_are_cast_and_the_optimizer_is_not(tmp_path):
    path, states = saved(tmp_path)
    cast = reshard(path, tmp_path / "cast", dtype="bfloat16").path
    assert verify(cast, full=True).ok
    for name, tensor in load_file(cast / "model.safetensors").items():
        old = states["model"].state[name]
        assert torch.equal(tensor, old.bfloat16() if old.is_floating_point() else old)
    assert (cast / "optimizer.safetensors").read_bytes() == (
        path / "optimizer.safetensors"
    ).read_bytes()
    assert json.loads((cast / "config.json").read_text()) == {
        "dtype": "bfloat16",
        "model_type": "llama",
    }
    with pytest.raises(CheckpointError, match="dtype 'int8': expected one of"):
        reshard(path, tmp_path / "other", dtype="int8")


def test_large_weights_are_split_and_indexed_anew(tmp_path):
    path, states = saved(tmp_path)
    split = reshard(path, tmp_path / "split", max_shard_size=1000).path
    index = json.loads((split / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == states["model"].state.keys()
    assert loaded(split, states)
    cut = reshard(split, tmp_path / "cut", layout="distributed", mesh=Mesh(1, 2)).path
    assert not (cut / "model.safetensors.index.json").exists()
    assert content(reshard(cut, tmp_path / "back").path) == content(path)


def test_weights_that_no_optimizer_moves_stay_in_files_of_their_own(tmp_path):
    states = sample_states()
    del states["optimizer"].state["model.embed_tokens.weight"]
    path, _ = saved(tmp_path, states)
    cut = reshard(path, tmp_path / "cut", layout="distributed", mesh=Mesh(1, 2)).path
    assert len(list((cut / "rank_00001").glob("model-*.safetensors"))) == 2
    assert content(reshard(cut, tmp_path / "back").path) == content(path)


def test_an_adapter_stays_one_whole_file(tmp_path):
    weights = {"base_model.model.q.lora_A.weight": torch.randn(4, 8)}
    moments = {name: {"exp_avg": torch.randn(4, 8)} for name in weights}
    states = {"model": Holder(weights), "optimizer": Holder(moments)}
    path = save(tmp_path, 3, states, kind="adapter")
    cut = reshard(path, tmp_path / "cut", layout="distributed", mesh=Mesh(1, 3)).path
    assert same(load_file(cut / "adapter_model.safetensors"), weights)
    assert loaded(cut, states)
    assert content(reshard(cut, tmp_path / "back").path) == content(path)


def damaged(path, mode):
    file = path / "rank_00001" / "optimizer.safetensors"
    if mode == "flipped":
        flip(file, -9)
    elif mode == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        for inner in file.parent.iterdir():
            inner.unlink()
        file.parent.rmdir()


@pytest.mark.parametrize("mode", ["flipped", "cut", "gone"])
def test_damage_ends_it_and_nothing_is_left(mode, tmp_path):
    path, _ = saved(tmp_path)
    cut = reshard(path, tmp_path / "cut", layout="distributed", mesh=Mesh(1, 3)).path
    damaged(cut, mode)
    before, opened = tree_bytes(tmp_path), num_open()
    for number, options in enumerate(({}, {"layout": "distributed", "mesh": Mesh(1, 2)})):
        with pytest.raises(CheckpointError, match="rank_00001") as error:
            reshard(cut, tmp_path / f"out{number}", **options)
        assert "\n" not in str(error.value)
    del error
    assert tree_bytes(tmp_path) == before
    assert num_open() <= opened


def test_ranks_of_two_saves_are_found(tmp_path):
    cuts = []
    for seed in (1, 2):
        path, _ = saved(tmp_path / str(seed), sample_states(seed))
        cut = tmp_path / f"cut{seed}"
        cuts.append(reshard(path, cut, layout="distributed", mesh=Mesh(1, 2)).path)
    mixed = cuts[0] / "rank_00001" / "model.safetensors"
    mixed.write_bytes((cuts[1] / "rank_00001" / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"rank_00001/model.safetensors: .* damaged"):
        reshard(cuts[0], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(tmp_path):
    path, _ = saved(tmp_path)
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="there: it exists already"):
        reshard(path, tmp_path / "there")
    with pytest.raises(CheckpointError, match="it exists already"):
        reshard(path, path)
    with pytest.raises(CheckpointError, match="is inside the checkpoint"):
        reshard(path, path / "inside")
    with pytest.raises(CheckpointError, match="layout full is the same for every mesh"):
        reshard(path, tmp_path / "out", mesh=Mesh(1, 2))
    with pytest.raises(CheckpointError, match="does not exist"):
        reshard(tmp_path / "nowhere", tmp_path / "out")
    assert verify(path, full=True).ok
    assert not (tmp_path / "out").exists()


def test_what_a_killed_conversion_left_is_removed_by_the_next(tmp_path):
    path, _ = saved(tmp_path)
    left = tmp_path / ".out.0123abcd.part"
    left.mkdir()
    (left / "manifest.json").touch()
    (tmp_path / ".other.0123abcd.part").mkdir()
    reshard(path, tmp_path / "out")
    assert not left.exists()
    assert (tmp_path / ".other.0123abcd.part").exists()


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    path, _ = saved(tmp_path)
    before = tree_bytes(tmp_path)

    monkeypatch.setattr(files, "os", But(posix_fallocate=refusing(errno.ENOSPC)))
    with pytest.raises(CheckpointError, match="the disk is full"):
        reshard(path, tmp_path / "out", layout="distributed", mesh=Mesh(1, 2))
    monkeypatch.undo()
    assert tree_bytes(tmp_path) == before


def test_columns_are_put_together_and_checked(tmp_path):
    """As other meshes than ours may have cut them."""
    states = sample_states()
    columns = saved_by_ranks(tmp_path / "columns", states, halves)
    full = reshard(columns, tmp_path / "full").path
    assert loaded(full, states)
    rows = reshard(columns, tmp_path / "rows", layout="distributed", mesh=Mesh(1, 3)).path
    assert loaded(rows, states)
    flip(columns / "rank_00001" / "model.safetensors", -40)
    with pytest.raises(CheckpointError, match="rank_00001/model"):
        reshard(columns, tmp_path / "out")


@pytest.mark.parametrize("layout", ["full", "distributed"])
def test_bytes_that_were_read_wrong_once_are_not_written(layout, tmp_path, monkeypatch):
    path, _ = saved(tmp_path, sample_states(scale=30))
    read = []

    def wrong_once(descriptor, buffers, offset):
        count = os.preadv(descriptor, buffers, offset)
        if count == 30 * 16 * 8 * 4 // (3 if layout == "distributed" else 1) and not read:
            buffers[0][count // 2] ^= 4
            read.append(offset)
        return count

    monkeypatch.setattr(files, "os", But(preadv=wrong_once))
    mesh = Mesh(1, 3) if layout == "distributed" else Mesh()
    with pytest.raises(DamagedFileError, match=r"model\.safetensors: .*embed_tokens.* is damaged"):
        reshard(path, tmp_path / "out", layout=layout, mesh=mesh)
    assert read
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
