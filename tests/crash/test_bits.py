"""Every flipped bit and every truncation of a checkpoint is found, and the one before is taken."""

import random

import pytest
import torch

from checkpoint.sample import Holder
from surefoot.checkpoint.saving.preparation import save
from surefoot.checkpoint.verification import find_latest, verify

KINDS = ("flip", "cut", "extend")


@pytest.fixture(scope="module")
def run(scratch):
    """Two small checkpoints; the newer one is damaged, in every way in turn."""
    states = {
        "model": Holder({"w": torch.randn(2, 3), "b": torch.ones(2, dtype=torch.bool)}),
        "optimizer": Holder({"w": {"exp_avg": torch.randn(2, 3)}}),
        "trainer": Holder({"global_step": 1, "loss": 0.5}),
    }
    root = scratch / "bits"
    for step in (1, 2):
        folder = save(root, step, states, companions={"config.json": b'{"a": 1}'})
    return root, folder


def damages(folder):
    """Every bit of every file to flip, every length to cut it to, and a byte too many."""
    for path in sorted(folder.iterdir()):
        size = path.stat().st_size
        yield from ((path, "flip", bit) for bit in range(8 * size))
        yield from ((path, "cut", length) for length in range(size))
        yield path, "extend", 1


def damaged(data, kind, where):
    if kind == "cut":
        return data[:where]
    if kind == "extend":
        return data + b"\n"
    broken = bytearray(data)
    broken[where // 8] ^= 1 << (where % 8)
    return bytes(broken)


def check(run, cases, with_find):
    root, folder = run
    for path, kind, where in cases:
        whole = path.read_bytes()
        path.write_bytes(damaged(whole, kind, where))
        assert not verify(folder, full=True).ok, f"{path.name}: {kind} {where} was not found"
        if with_find:
            assert find_latest(root).path == root / "checkpoint-1"
        path.write_bytes(whole)
    assert verify(folder, full=True).ok


def test_sampled_damage_is_found_and_passed_over(run):
    cases = list(damages(run[1]))
    check(run, random.Random(0).sample(cases, 600), with_find=True)


@pytest.mark.proof
def test_every_damage_is_found(run):
    check(run, damages(run[1]), with_find=False)


def test_every_file_that_is_missing_is_found(run):
    for path in sorted(run[1].iterdir()):
        whole = path.read_bytes()
        path.unlink()
        assert not verify(run[1], full=True).ok
        assert find_latest(run[0]).path == run[0] / "checkpoint-1"
        path.write_bytes(whole)
