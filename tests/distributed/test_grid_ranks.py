"""Ranks that save with rules: the checkpoint is that of format 1.0 to the bit, for every reader and
on any mesh, and a save that is interrupted leaves nothing."""

import json
import os
import signal
from dataclasses import replace

import pytest
import torch

import commands
import ranks
import small
from checkpoint.sample import Holder
from each import some
from kept import assert_bitwise, assert_written_once, everything, go_on, together
from spread import UNEVEN, learn, trainer, writers
from spread import save as store
from surefoot.checkpoint.converting._resharding import reshard
from surefoot.checkpoint.converting.targets import adapter_files
from surefoot.checkpoint.disk._bytes import block_hashes, raw
from surefoot.checkpoint.disk.commit import committed
from surefoot.checkpoint.disk.folder import open_checkpoint
from surefoot.checkpoint.looking.diff import compare_tensors, compare_values
from surefoot.checkpoint.saving import _grid_plan, preparation
from surefoot.checkpoint.saving.saver import AsyncSaver
from surefoot.checkpoint.verification import verify
from surefoot.methods import LoRA
from surefoot.parallel.sharding import Box
from surefoot.parallel.world import ALONE
from surefoot.storage.files import digest

TRAIN = {"micro_batch_size": 1, "global_batch_size": 12}
QWEN = {"kind": "qwen2", "num_hidden_layers": 3, "train": TRAIN, **UNEVEN}
CASES = [
    (4, {"dp_shard": 2, "tp": 2}),
    (2, {"pp": 2}),
    (4, {"pp": 2, "dp_shard": 2}),
    (4, {"dp_replicate": 2, "dp_shard": 2}),
    (3, {"dp_shard": 3}),
    (2, {"dp_replicate": 2}),
]
MESHES = [(1, {}), (2, {"dp_shard": 2}), (2, {"pp": 2}), (4, {"dp_replicate": 2, "tp": 2})]


@pytest.fixture
def few(monkeypatch):
    """Rules for any number of ranks."""
    monkeypatch.setattr(preparation, "MOST_WITH_PIECES", 1)


def both(world, folder, changes):
    """After two steps: a checkpoint of each format, and what is in them."""
    made = trainer(world, folder / "run", **changes)
    learn(made, 2)
    with_rules = store(made, folder / "rules", "distributed")
    preparation.MOST_WITH_PIECES = 64
    with_pieces = store(made, folder / "pieces", "distributed")
    return with_rules, with_pieces, everything(made)


def assert_equal(a, b):
    assert {change.verdict for change in compare_tensors(a, b)} == {"equal"}
    assert not any(compare_values(a, b).values())


@pytest.mark.parametrize(("count", "parallel"), some(CASES, CASES[:1]), ids=str)
def test_rules_give_the_checkpoint_that_pieces_give(few, tmp_path, count, parallel):
    found = ranks.run(count, lambda w: both(w, tmp_path, QWEN), **parallel)
    (path, expected, _), manifests = found[0], []
    for folder in (path, expected):
        assert verify(folder, full=True).ok
        assert_written_once(folder)
        manifests.append(json.loads((folder / "manifest.json").read_text()))
    assert [m["version"] for m in manifests] == ["1.1", "1.0"]
    assert not [p for p in manifests[0]["pieces"] if not p["tensor"].startswith("state/")]
    assert_equal(path, expected)
    states = together(part for _, _, part in found)
    for number, options in MESHES[2:3] if count == 4 else MESHES[1:2]:
        back = ranks.run(number, lambda w: go_on(w, tmp_path, path, **QWEN), **options)
        assert_bitwise(together(part for _, part, _ in back), states)
    reshard(path, tmp_path / "full")
    assert_equal(tmp_path / "full", expected)
    for words in (("verify", path), ("show", path), ("diff", path, expected)):
        assert commands.ok("ckpt", *map(str, words))


def test_all_ranks_write_an_equal_part_of_what_has_copies(few, tmp_path):
    parallel = {"dp_replicate": 2, "dp_shard": 2}
    path, *_ = ranks.run(4, lambda w: both(w, tmp_path, QWEN), **parallel)[0]
    files = open_checkpoint(path).manifest.files
    sizes = [files[f"rank_{rank:05d}/optimizer.safetensors"] for rank in range(4)]
    assert max(sizes) < 1.1 * sum(sizes) / 4


def test_an_adapter_stays_one_file_and_its_optimizer_has_rules(few, tmp_path):
    changes = {**QWEN, "method": LoRA(rank=3, alpha=8.0)}
    path, expected, _ = ranks.run(2, lambda w: both(w, tmp_path, changes), dp_shard=2)[0]
    manifest = open_checkpoint(path).manifest
    assert "adapter_model.safetensors" in manifest.files
    assert {rule.tensor.partition("/")[0] for rule in manifest.grid.rules} == {"optimizer"}
    assert verify(path, full=True).ok
    assert_equal(path, expected)
    assert adapter_files(path).keys() == adapter_files(expected).keys()
    one = go_on(ALONE, tmp_path, path, **changes)[1]
    assert_bitwise(one, go_on(ALONE, tmp_path, expected, **changes)[1])


def test_ranks_that_have_other_rules_save_pieces(few, tmp_path, monkeypatch):
    """As of a tensor that one rank alone has cut otherwise than it says."""
    split = _grid_plan.split_rules

    def other(holding, axes, rank):
        rules, rest = split(holding, axes, rank)
        return rules[rank:], rest

    monkeypatch.setattr("surefoot.checkpoint.saving.preparation.split_rules", other)
    path, expected, _ = ranks.run(2, lambda w: both(w, tmp_path, QWEN), dp_shard=2)[0]
    assert open_checkpoint(path).manifest.grid is None
    assert_equal(path, expected)


def test_what_has_no_rule_is_a_piece_beside_the_rules(few, tmp_path, monkeypatch):
    split = _grid_plan.split_rules

    def fewer(holding, axes, rank):
        odd = {
            role: {n: replace(t, cuts=None) if "mlp" in n else t for n, t in tensors.items()}
            for role, tensors in holding.items()
        }
        return split(odd, axes, rank)

    monkeypatch.setattr("surefoot.checkpoint.saving.preparation.split_rules", fewer)
    path, expected, _ = ranks.run(4, lambda w: both(w, tmp_path, QWEN), dp_shard=2, pp=2)[0]
    manifest = open_checkpoint(path).manifest
    assert {p.tensor for p in manifest.pieces if "mlp" in p.tensor}
    assert not [rule for rule in manifest.grid.rules if "mlp" in rule.tensor]
    assert verify(path, full=True).ok
    assert_written_once(path)
    assert_equal(path, expected)


def test_saves_in_the_background_link_what_is_equal_in_the_parent(few, tmp_path, monkeypatch):
    def work(world):
        made = small.saving(trainer(world, tmp_path), keep=None, layout="distributed")
        with made.saver:
            for step in (1, 2):
                made.saver.save(step, made.states)
                made.saver.wait()
        return shared

    shared, note = [], AsyncSaver._note

    def noted(saver, ask):
        def asked():
            if (saved := ask()) is not None:
                shared.append(saved.num_shared)
            return saved

        note(saver, asked)

    monkeypatch.setattr(AsyncSaver, "_note", noted)
    shared = ranks.run(2, work, dp_shard=2)[0]
    paths = committed(tmp_path)
    assert all(verify(path, full=True).ok for path in paths)
    assert open_checkpoint(paths[1]).manifest.grid is not None
    lists = [(path / "rank_00000/hashes.json").read_bytes() for path in paths]
    assert lists[0] == lists[1]
    assert shared[1] > 0.9 * (paths[1] / "rank_00000/model.safetensors").stat().st_size


@pytest.mark.cold_writer
@pytest.mark.parametrize("rank", [0, 1])
def test_a_writer_that_is_killed_leaves_nothing_and_all_write_again(few, tmp_path, rank):
    def work(world):
        made = small.saving(trainer(world, tmp_path), keep=None, layout="distributed")
        with made.saver:
            for step, number in ((1, None), (2, signal.SIGSTOP), (3, signal.SIGKILL)):
                if number is not None and world.rank == rank:
                    os.kill(made.saver._flight.pid, number)
                learn(made, 1)
                made.saver.save(step, made.states)
                if number is None:
                    made.saver.wait()
        return str(made.saver.newest)

    assert ranks.run(2, work, dp_shard=2) == [str(tmp_path / "checkpoint-3")] * 2
    for path in committed(tmp_path):
        assert verify(path, full=True).ok
        assert open_checkpoint(path).manifest.grid is not None
    assert [path.name for path in committed(tmp_path)] == [f"checkpoint-{n}" for n in (1, 2, 3)]


@pytest.mark.parametrize("in_background", [True, False])
def test_large_pieces_have_hashes_of_their_blocks(few, tmp_path, in_background):
    whole = torch.arange(9 << 12, dtype=torch.float32).reshape(-1, 1024)  # 72 KiB for each rank

    def work(world):
        group = writers(world, "distributed")
        options = {"writers": group, "has_lock": True, "in_background": in_background}
        with AsyncSaver(tmp_path, **options) as saver:
            saver.save(1, {"model": Holder({"w": whole})})
            saver.wait()

    ranks.run(2, work, dp_replicate=2)
    checkpoint = open_checkpoint(tmp_path / "checkpoint-1")
    pieces = [*checkpoint.manifest.tensors("model")["w"]]
    assert [len(piece.blocks) for piece in pieces] == [2, 2]
    assert verify(checkpoint.path, full=True).ok
    for piece in pieces:
        with checkpoint.tensors(piece.file) as file:
            for row in (piece.box.start[0], piece.box.stop[0] - 1):
                checkpoint.check_stored(file, piece, Box((row, 0), (1, 1024)))


def test_blocks_of_live_tensors_are_those_of_their_bytes():
    whole = torch.arange(3000, dtype=torch.float32).reshape(60, 50)
    for tensor in (whole, whole.t(), whole[:, :7], whole[:0]):
        data = bytes(raw(tensor.contiguous()))
        expected = [digest(data[at : at + 1000]) for at in range(0, len(data), 1000)]
        assert block_hashes(tensor, 1000) == expected
