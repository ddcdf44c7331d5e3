"""What a rank reads of a checkpoint in a store: the bytes that it needs, each of them checked."""

import shutil

import pytest
import torch

from checkpoint.gridded import gridded
from checkpoint.sample import Holder, sample_states
from surefoot.checkpoint.apart import Apart
from surefoot.checkpoint.disk.folder import open_checkpoint
from surefoot.checkpoint.saving.preparation import save
from surefoot.errors import DamagedFileError
from surefoot.parallel.sharding import Box
from surefoot.plugins.cloud.remote_run import STORES

LARGE = 5 << 14  # elements of four bytes: 320 KiB, 160 on each of two ranks, in blocks of 64
ROWS = LARGE // 64
BLOCK = 64 << 10


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    states = {"model": Holder({"w": torch.arange(LARGE, dtype=torch.float32).reshape(-1, 64)})}
    states["optimizer"] = sample_states()["optimizer"]
    saved = save(folder / "whole", 7, states)
    return gridded(saved, folder / "checkpoint-7", {"dp_shard": 2, "tp": 1}, stage_of=lambda _: 0)


@pytest.fixture
def run(large, tmp_path):
    """A run in a mounted store, with that checkpoint."""
    there = tmp_path / "store" / "checkpoint-7"
    shutil.copytree(large, there)
    url, here = f"file://{tmp_path}/store", tmp_path / "here"
    return there, Apart(url=url, launch=1, history=(), folder=str(here), seconds=1.0)


def fetched(apart, box):
    """What comes for a box of the large tensor: the bytes, the folder, its pieces."""
    folder = apart.outlines(0) / "checkpoint-7"
    folder.mkdir(parents=True, exist_ok=True)
    STORES.outline(apart, 7, folder)
    for rank in range(2):
        STORES.fetch_file(apart, 7, folder, f"rank_{rank:05d}/hashes.json")
    checkpoint = open_checkpoint(folder)
    pieces = list(checkpoint.manifest.tensors("model")["w"].near(box))
    parts = [(piece, piece.box & box) for piece in pieces]
    return STORES.fetch_pieces(apart, 7, checkpoint, parts), checkpoint, pieces


def test_of_a_part_of_a_large_piece_its_blocks_come(run):
    _, apart = run
    num_bytes, checkpoint, pieces = fetched(apart, Box((100, 0), (8, 64)))
    assert BLOCK < num_bytes < BLOCK + 10_000  # and a header
    (piece,) = pieces
    with checkpoint.tensors(piece.file) as file:
        checkpoint.check_stored(file, piece, Box((100, 0), (8, 64)))
    assert not list(checkpoint.path.glob("rank_00001/*.safetensors"))


def test_what_is_here_is_not_read_again_and_damage_here_is_repaired(run):
    _, apart = run
    everything = Box((0, 0), (ROWS, 64))
    num_bytes, checkpoint, (first, second) = fetched(apart, everything)
    assert first.num_bytes + second.num_bytes < num_bytes < LARGE * 4 + 20_000
    assert fetched(apart, everything)[0] == 0
    path = checkpoint.path / second.file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert fetched(apart, everything)[0] == second.num_bytes
    with checkpoint.tensors(second.file) as file:
        checkpoint.check_stored(file, second)


def test_the_part_that_a_rank_of_this_machine_has_saved_is_taken(run):
    there, apart = run
    own = apart.part_of(1) / "checkpoint-7" / "rank_00001"
    shutil.copytree(there / "rank_00001", own)
    num_bytes, _, pieces = fetched(apart, Box((0, 0), (ROWS, 64)))
    assert num_bytes < pieces[0].num_bytes + 10_000


def test_damage_in_the_store_is_named_where_it_is_read(run):
    there, apart = run
    path = there / "rank_00000" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # in its last block
    path.write_bytes(data)
    fetched(apart, Box((100, 0), (8, 64)))
    with pytest.raises(DamagedFileError, match=r"rank_00000/model\.safetensors: 'w': its hash"):
        fetched(apart, Box((ROWS // 2 - 8, 0), (8, 64)))
