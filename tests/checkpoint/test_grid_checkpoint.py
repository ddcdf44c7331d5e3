"""A checkpoint with a rule per tensor: every reader finds in it what layout full has."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import commands
from damage import flip
from surefoot.checkpoint.converting._resharding import reshard
from surefoot.checkpoint.disk.folder import open_checkpoint
from surefoot.checkpoint.loading import load
from surefoot.checkpoint.looking.diff import compare_tensors
from surefoot.checkpoint.looking.listing import list_run
from surefoot.checkpoint.looking.summary import summarise
from surefoot.checkpoint.saving.preparation import save
from surefoot.checkpoint.verification import verify
from surefoot.errors import CheckpointError
from surefoot.parallel.sharding import Box

from .gridded import AXES, gridded, relisted, resealed
from .sample import Holder, blank, same_states, sample_states

LISTS = [f"rank_{rank:05d}/hashes.json" for rank in range(8)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return save(tmp_path_factory.mktemp("whole"), 7, sample_states())


@pytest.fixture
def folder(whole, tmp_path):
    return gridded(whole, tmp_path / "run" / "checkpoint-7")


def test_it_is_loaded_as_it_was_saved(folder):
    states = blank(sample_states())
    load(folder, states)
    assert same_states(states, sample_states())
    report = verify(folder)
    assert report.ok and not report.notes


def test_every_reader_finds_in_it_what_the_other_layout_has(whole, folder, tmp_path):
    assert {change.verdict for change in compare_tensors(whole, folder)} == {"equal"}
    groups, expected = (
        {t: replace(t, file="") for group in summarise(path).groups for t in group.tensors}
        for path in (folder, whole)
    )
    assert [*groups.values()] == [*expected.values()]
    (line,) = list_run(folder.parent)
    assert line.problem is None
    reshard(folder, tmp_path / "back")
    assert not [*(tmp_path / "back").rglob("hashes.json")]
    for name in ("model.safetensors", "optimizer.safetensors", "state.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (whole / name).read_bytes()


def test_the_commands_open_it(whole, folder):
    shutil.copy(whole / "manifest.json", whole.parent / "unused")
    for words in (("verify", folder), ("show", folder), ("ls", folder.parent)):
        assert commands.ok("ckpt", *map(str, words))
    assert "equal" in commands.ok("ckpt", "diff", str(whole), str(folder))


def test_a_rank_reads_the_lists_and_files_of_the_ranks_near_it_only(folder):
    for rank in (1, 2, 3, 4, 5, 6, 7):
        shutil.rmtree(folder / f"rank_{rank:05d}")
    manifest = open_checkpoint(folder).manifest
    pieces = manifest.tensors("model")["model.embed_tokens.weight"]
    (piece,) = pieces.near(Box((2, 1), (4, 2)))
    assert (piece.file, piece.box) == ("rank_00000/model.safetensors", Box((0, 0), (8, 4)))
    with pytest.raises(CheckpointError, match=r"rank_00002.hashes\.json"):
        list(pieces.near(Box((8, 1), (4, 2))))


LARGE = 5 << 14  # elements of four bytes: 320 KiB, 160 on each of two ranks, in blocks of 64


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    states = {"model": Holder({"w": torch.arange(LARGE, dtype=torch.float32).reshape(-1, 64)})}
    states["optimizer"] = Holder({})
    saved = save(folder / "whole", 7, {**states, "optimizer": sample_states()["optimizer"]})
    return gridded(saved, folder / "checkpoint-7", {"dp_shard": 2, "tp": 1}, stage_of=lambda _: 0)


def test_a_part_of_a_piece_is_checked_by_its_blocks(large, tmp_path):
    copy = shutil.copytree(large, tmp_path / "copy")
    checkpoint = open_checkpoint(copy)
    rows = LARGE // 64
    box = Box((rows // 2 - 8, 0), (8, 64))  # the end of the first rank's piece
    (piece,) = checkpoint.manifest.tensors("model")["w"].near(box)
    assert len(piece.blocks) == 3
    flip(copy / piece.file, 1 << 14)  # in its first block
    with checkpoint.tensors(piece.file) as file:
        checkpoint.check_stored(file, piece, box)
        with pytest.raises(CheckpointError, match="'w' has changed since it was saved"):
            checkpoint.check_stored(file, piece, Box((0, 0), (1, 1)))
        with pytest.raises(CheckpointError, match="'w' has changed since it was saved"):
            checkpoint.check_stored(file, piece)
    flip(copy / piece.file, -1)
    with (
        checkpoint.tensors(piece.file) as file,
        pytest.raises(CheckpointError, match="'w' has changed since it was saved"),
    ):
        checkpoint.check_stored(file, piece, box)


def refused(folder, match):
    """By ``verify`` and by a load, which changes nothing."""
    report = verify(folder)
    assert any(re.search(match, problem) for problem in report.problems), report
    with pytest.raises(CheckpointError, match=match):
        load(folder, blank(sample_states()))


def test_a_hash_list_that_is_missing_damaged_or_short_is_named(folder):
    path = folder / LISTS[5]
    data = path.read_bytes()
    flip(path, 40)
    refused(folder, r"rank_00005/hashes.json: its hash is not the manifest's")
    path.write_bytes(data[:-1])
    refused(folder, r"rank_00005/hashes.json: \d+ bytes, expected")
    path.unlink()
    refused(folder, r"rank_00005/hashes.json")


def test_a_hash_list_that_lies_is_named(folder):
    def move(listed):
        listed["model.safetensors"] |= listed.pop("optimizer.safetensors")

    relisted(folder, 4, move)
    refused(folder, "rank_00004/(model|optimizer).safetensors: file and manifest disagree")


def test_a_hash_list_without_a_tensor_of_its_rank_is_named(folder):
    relisted(folder, 4, lambda listed: listed.pop("model.safetensors"))
    refused(folder, "rank_00004/hashes.json: the box of 'model/.*' of rank 4 is missing")


def test_a_hash_that_lies_is_found(folder):
    def lie(listed):
        listed["model.safetensors"]["model/model.norm.weight"] = ["0" * 32]

    relisted(folder, 0, lie)
    refused(folder, "'model.norm.weight' has changed since it was saved")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.update(axes=["tp", "dp_shard", "pp"]), "is not of rank"),
        (lambda m: m["mesh"].update(tp=4), "16 ranks in layout distributed of 8"),
        (lambda m: m["rules"].pop(), "is not of rank"),
        (lambda m: m["rules"][0].update(cuts=[]), "is missing|is not of rank|expected"),
        (lambda m: m["rules"][0].update(dtype="F64"), "as in the manifest"),
        (lambda m: m["rules"][0].update(stage=1), "is missing|is not of rank"),
    ],
    ids=["axes", "mesh", "a rule less", "cuts", "dtype", "stage"],
)
def test_rules_that_do_not_fit_the_files_are_refused(folder, change, why):
    resealed(folder, change)
    assert any(re.search(why, problem) for problem in verify(folder).problems)
    with pytest.raises(CheckpointError):
        load(folder, blank(sample_states()))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_every_flipped_bit_is_found(tmp_path_factory, whole, data):
    folder = tmp_path_factory.mktemp("bits") / "checkpoint-7"
    gridded(whole, folder, {"pp": 2, "tp": 1, "dp_shard": 2})
    names = [*json.loads((folder / "manifest.json").read_text())["files"], "manifest.json"]
    path = folder / data.draw(st.sampled_from(sorted(names)))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    assert not verify(folder).ok


def test_the_mesh_may_have_any_order_and_any_tensor_may_be_replicated(whole, tmp_path):
    axes = dict(reversed(AXES.items()))
    target = gridded(
        whole, tmp_path / "checkpoint-7", axes, lambda t: [["tp", 0]] if t.ndim else []
    )
    states = blank(sample_states())
    load(target, states)
    assert same_states(states, sample_states())
