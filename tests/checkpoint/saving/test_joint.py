"""Several processes write one checkpoint: all of it is committed, or none."""

import errno
import json
import sys
import threading
import time
from functools import partial

import pytest
import torch

import warm
from surefoot.checkpoint.disk._bytes import describe
from surefoot.checkpoint.disk.commit import committed
from surefoot.checkpoint.disk.manifest import STATE
from surefoot.checkpoint.disk.tensorfile import plan_save
from surefoot.checkpoint.layouts.opening import open_folder
from surefoot.checkpoint.saving import _joint as joint
from surefoot.checkpoint.saving import _writing as writing
from surefoot.checkpoint.saving._writing import Job, Shard, write
from surefoot.checkpoint.saving.preparation import LiveTensors
from surefoot.checkpoint.sources import read_whole
from surefoot.checkpoint.verification import verify
from surefoot.errors import CheckpointError
from surefoot.parallel.sharding import Box, chunk
from surefoot.storage import files

WHOLE = {"a.weight": torch.arange(21.0).reshape(7, 3), "b.weight": torch.arange(2.0)}
RANKS = 3


def job(root, rank, **changes):
    """Rank ``rank``'s part of WHOLE, cut along the first dimension."""
    values, boxes = {}, {}
    for name, tensor in WHOLE.items():
        first, length = chunk(len(tensor), RANKS, rank)
        if length:
            values[name] = tensor[first : first + length]
            start = (first, *(0,) * (tensor.ndim - 1))
            boxes[name] = tuple(tensor.shape), Box(start, tuple(values[name].shape))
    described = {name: describe(name, tensor) for name, tensor in values.items()}
    plans = plan_save(f"rank_{rank:05d}/model", described, None, boxes=boxes)
    made = Job(
        root=root,
        step=5,
        kind="full",
        created="2026-01-31T12:34:56Z",
        versions={"surefoot": "0"},
        shards=[Shard("model", plan) for plan in plans],
        small={STATE: b"{}\n"} if rank == 0 else {},
        layout="distributed",
        rank=rank,
        world_size=RANKS,
        nonce="0badcafe",
        **changes,
    )
    return made, LiveTensors({"model": values})


def others(root, ranks=(1, 2), fault=None):
    """The other processes, as threads."""

    def run(rank):
        if fault is not None and rank == 2:
            fault(root)
            return
        write(*job(root, rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    return threads


def test_what_all_have_written_is_one_checkpoint(tmp_path):
    threads = others(tmp_path)
    time.sleep(0.1)  # they wait for the folder
    saved = write(*job(tmp_path, 0))
    for thread in threads:
        thread.join()
    assert verify(saved.path, full=True).ok
    source = open_folder(saved.path)
    for name, tensor in WHOLE.items():
        assert torch.equal(read_whole(source, name), tensor)
    manifest = json.loads((saved.path / "manifest.json").read_text())
    assert manifest["world_size"] == RANKS
    assert not list(saved.path.glob(".*"))
    assert saved.num_bytes == sum(manifest["files"].values())


def test_the_first_does_not_commit_before_the_last_has_reported(tmp_path):
    threads = others(tmp_path, ranks=(1,))
    first = threading.Thread(target=lambda: write(*job(tmp_path, 0)))
    first.start()
    # its file stays; its report is gone as soon as the first one has read it
    while not any(tmp_path.glob(".*.part/rank_00001/model.safetensors")):
        assert first.is_alive() and threads[0].is_alive()
        time.sleep(0.01)
    time.sleep(0.2)
    assert committed(tmp_path) == []
    write(*job(tmp_path, 2))
    for thread in (first, *threads):
        thread.join()
    assert committed(tmp_path) == [tmp_path / "checkpoint-5"]


def test_an_error_of_another_process_is_told_by_the_first(tmp_path):
    def fails(root):
        def act():
            raise OSError(errno.ENOSPC, "No space left on device", str(root / "x"))

        writing.write_own_part(writing.meeting_of(job(root, 2)[0], lambda: False), act)

    threads = others(tmp_path, fault=fails)
    with pytest.raises(CheckpointError, match=r"rank 2: .*the disk is full"):
        write(*job(tmp_path, 0))
    for thread in threads:
        thread.join()
    assert list(tmp_path.iterdir()) == []


DIES = """
import os, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from checkpoint.saving.test_joint import job
from surefoot.checkpoint.saving import _writing as writing
def act():
    os._exit(9)
writing.write_own_part(writing.meeting_of(job(Path(sys.argv[1]), 2)[0], lambda: False), act)
"""


def test_a_process_that_dies_in_the_middle_is_noticed_by_its_lock(tmp_path):
    def dies(root):
        warm.run([sys.executable, "-c", DIES, str(root), *sys.path])

    threads = others(tmp_path, fault=dies)
    with pytest.raises(CheckpointError, match="rank 2 died during the save"):
        write(*job(tmp_path, 0))
    for thread in threads:
        thread.join()
    assert committed(tmp_path) == []


def test_one_that_never_begins_is_not_waited_for_when_all_that_train_are_dead(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(joint, "_LAST_CHANCE", 0.2)
    threads = others(tmp_path, ranks=(1,))
    with pytest.raises(CheckpointError, match="rank 2 did not start to save"):
        write(*job(tmp_path, 0), is_orphan=lambda: True)
    threads[0].join()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_machine_does_not_see_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(joint, "_PATIENCE", 0.1)
    with pytest.raises(CheckpointError, match=r"all machines must share train\.output_dir"):
        write(*job(tmp_path / "elsewhere", 1))


def test_a_report_is_never_half_read(tmp_path):
    """It is locked until it is whole, and it has its name only when it is locked."""
    path = tmp_path / ".rank_00001.json"
    with files.create(path) as report:
        report.lock()
        done = []
        meeting = writing.meeting_of(job(tmp_path, 0)[0], lambda: False)
        wait = partial(meeting._wait_for, partial(joint._look, path, 1), 1)
        thread = threading.Thread(target=lambda: done.append(wait()))
        thread.start()
        time.sleep(0.1)
        assert done == []
        report.write_at(0, b'{"files": {}}')
    thread.join()
    assert done == [{"files": {}}]
