"""What is saved is the state at the call, whatever the device computes before and after it."""

import sys

import pytest
import torch

from checkpoint.sample import Holder
from surefoot.checkpoint.loading import load
from surefoot.checkpoint.saving import _writer_process as snapshot
from surefoot.checkpoint.saving._snapshot_buffer import SnapshotBuffer
from surefoot.checkpoint.saving.saver import AsyncSaver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux's"),
]


def keep_busy(device):
    """Queue work on a GPU that takes some tenths of a second."""
    if device.type == "cuda":
        torch.cuda._sleep(500_000_000)


def state_of(device):
    """64 MB on a GPU: a copy that takes milliseconds."""
    rows = 4096 if device.type == "cuda" else 64
    names = ("a", "b", "c", "d")
    return {name: torch.zeros(rows, 1024, device=device) for name in names}


def test_a_save_waits_for_what_was_queued_and_notices_nothing_that_follows(device, tmp_path):
    weights = state_of(device)
    with AsyncSaver(tmp_path) as saver:
        for step in (1, 2):  # the second one into memory that is pinned and used already
            keep_busy(device)
            for number, tensor in enumerate(weights.values()):
                tensor.fill_(10 * step + number)
            saver.save(step, {"model": Holder(weights)})
            for tensor in weights.values():
                tensor.fill_(-1.0)
        assert saver._flight._is_pinned == (device.type == "cuda")
    for step in (1, 2):
        into = {name: torch.empty(t.shape) for name, t in weights.items()}
        load(tmp_path / f"checkpoint-{step}", {"model": Holder(into)})
        for number, (name, tensor) in enumerate(into.items()):
            assert (tensor == 10 * step + number).all(), (step, name)


def test_a_snapshot_does_not_wait_for_another_stream(device, tmp_path):
    """Only for what was queued before it where the weights are updated."""
    if device.type != "cuda":
        pytest.skip("needs a GPU: a CPU has no streams")
    weights = state_of(device)
    other = torch.cuda.Stream()
    with AsyncSaver(tmp_path) as saver:
        saver.save(1, {"model": Holder(weights)})  # pins
        saver.wait()
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            torch.cuda._sleep(4_000_000_000)
        busy = torch.cuda.Event()
        busy.record(other)
        saver.save(2, {"model": Holder(weights)})
        assert not busy.query()
        busy.synchronize()


def test_memory_of_the_snapshot_is_pinned_and_given_back(device):
    if device.type != "cuda":
        pytest.skip("needs a GPU: nothing is pinned for a CPU")
    for _ in range(2):
        arena = SnapshotBuffer.create(1 << 20)
        assert snapshot.pin(arena)
        assert torch.frombuffer(arena.view, dtype=torch.uint8).is_pinned()
        snapshot.unpin(arena)
        arena.close()
