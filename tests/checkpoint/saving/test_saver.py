"""Saves of any loop in the background: what is promised when, and what is left when it fails."""

import contextlib
import itertools
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

import warm
from surefoot.checkpoint import (
    AsyncSaver,
    CheckpointError,
    RetentionPolicy,
    load,
    recover_latest,
    verify,
)
from surefoot.checkpoint.disk.commit import committed
from surefoot.checkpoint.disk.folder import open_checkpoint
from surefoot.checkpoint.saving import (
    _snapshot_buffer as snapshot_buffer,
)
from surefoot.checkpoint.saving import (
    _writer_process as writer_process,
)

from ..sample import Holder, blank, same, sample_states


def steps(root):
    return [int(path.name.rpartition("-")[2]) for path in committed(root)]


def weights(value, names=("a", "b"), size=300_000):
    return {"model": Holder({name: torch.full((size,), float(value)) for name in names})}


def test_what_is_saved_is_the_state_at_the_call(tmp_path):
    states = sample_states()
    with AsyncSaver(tmp_path) as saver:
        saver.save(1, states)
        for tensor in states["model"].state.values():
            tensor.zero_()
    (path,) = committed(tmp_path)
    found = blank(sample_states())
    load(path, found)
    assert all(same(found[name].state, sample_states()[name].state) for name in found)


def test_committed_paths_are_told_once(tmp_path):
    with AsyncSaver(tmp_path) as saver:
        assert saver.poll() == saver.wait() == []
        saver.save(1, weights(1))
        assert saver.in_flight == tmp_path / "checkpoint-1"
        saver.save(2, weights(2))
        assert saver.newest == tmp_path / "checkpoint-1"
        assert saver.wait() == [tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"]
        assert saver.poll() == []
        assert saver.in_flight is None
        assert saver.newest == tmp_path / "checkpoint-2"


def test_poll_tells_without_waiting(tmp_path):
    with AsyncSaver(str(tmp_path)) as saver:
        saver.save(1, weights(1))
        done, deadline = [], time.monotonic() + 60
        while not done and time.monotonic() < deadline:
            done = saver.poll()
            time.sleep(0.01)
        assert done == [tmp_path / "checkpoint-1"]
        assert saver.poll() == []


@pytest.mark.parametrize("divisor", [1, 0])
def test_the_end_of_the_block_waits_also_after_an_error_in_the_loop(tmp_path, divisor):
    with contextlib.suppress(ZeroDivisionError), AsyncSaver(tmp_path) as saver:
        saver.save(1, weights(1))
        _ = 1 / divisor
    assert verify(tmp_path / "checkpoint-1", full=True).ok


@pytest.mark.parametrize("ask", ["save", "poll", "wait", "exit"])
def test_a_failed_save_is_told_at_the_next_call_and_the_next_save_works(tmp_path, ask):
    def call(saver):
        if ask == "save":
            saver.save(2, weights(2))
        while ask == "poll" and saver.in_flight:
            saver.poll()
        if ask == "wait":
            saver.wait()

    (tmp_path / "checkpoint-1").mkdir()
    if ask == "exit":
        with pytest.raises(CheckpointError, match="exists already"), AsyncSaver(tmp_path) as saver:
            saver.save(1, weights(1))
        return
    with AsyncSaver(tmp_path) as saver:
        saver.save(1, weights(1))
        with pytest.raises(CheckpointError, match="exists already"):
            call(saver)
        assert saver.in_flight is None
        saver.save(3, weights(3))
    assert steps(tmp_path) == [3]


def test_what_ended_the_loop_matters_more_than_a_failed_save(tmp_path, caplog):
    (tmp_path / "checkpoint-1").mkdir()
    with pytest.raises(ZeroDivisionError), AsyncSaver(tmp_path) as saver:
        saver.save(1, weights(1))
        _ = 1 / 0
    assert "exists already" in caplog.text


@pytest.mark.cold_writer
def test_a_killed_writer_costs_nothing(tmp_path, caplog):
    with AsyncSaver(tmp_path) as saver:
        saver.save(1, weights(1, size=8_000_000))
        for child in psutil.Process().children():
            if "surefoot.checkpoint.saving._writer" in child.cmdline():
                child.kill()
        assert saver.wait() == [tmp_path / "checkpoint-1"]
        assert "SIGKILL; is memory short?" in caplog.text
        assert verify(tmp_path / "checkpoint-1", full=True).ok
        saver.save(2, weights(2))
    assert {path.name for path in tmp_path.glob("*checkpoint*")} == {"checkpoint-1", "checkpoint-2"}


@pytest.mark.cold_writer
def test_a_forked_process_that_lives_on_holds_nothing_up(tmp_path):
    saver = AsyncSaver(tmp_path)
    saver.save(1, weights(1))
    if (child := os.fork()) == 0:  # as a worker of a data loader is
        signal.pause()
    try:
        saver.save(2, weights(2))
        saver.close()
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert steps(tmp_path) == [1, 2]


def test_what_did_not_change_is_linked(tmp_path):
    states = weights(1)
    states["optimizer"] = Holder({"a": {"exp_avg": torch.ones(300_000)}})
    with AsyncSaver(tmp_path) as saver:
        saver.save(1, states)
        states["model"].state["a"] += 1
        saver.save(2, states)
    assert open_checkpoint(tmp_path / "checkpoint-2").manifest.parent == "checkpoint-1"
    files = [{p.stat().st_ino for p in path.iterdir()} for path in committed(tmp_path)]
    assert files[0] & files[1]
    with AsyncSaver(tmp_path, resumed_from=tmp_path / "checkpoint-2", share=False) as saver:
        saver.save(3, states)
    assert open_checkpoint(tmp_path / "checkpoint-3").manifest.parent == "checkpoint-2"
    assert all(p.stat().st_nlink == 1 for p in (tmp_path / "checkpoint-3").iterdir())


@pytest.mark.parametrize(("keep", "most"), [(2, 1), (3, 2), (5, 4), (None, 8)])
def test_no_file_is_all_that_the_kept_checkpoints_have(tmp_path, keep, most):
    states = weights(1, size=300)
    states["optimizer"] = Holder({"a": {"exp_avg": torch.ones(3000)}})
    own, resumed = {}, None
    for start in (1, 13):  # also over a resume
        with AsyncSaver(tmp_path, keep=keep, resumed_from=resumed, in_background=False) as saver:
            for step in range(start, start + 12):
                states["model"].state["a"] += 1
                saver.save(step, states)
                saver.wait()
                resumed = saver.newest
                own[step] = (resumed / "optimizer.safetensors").stat().st_ino
                kept = {own[n] for n in steps(tmp_path)}
                assert len(kept) > 1 or len(steps(tmp_path)) <= min(most, 8)
    assert max(len(list(same)) for _, same in itertools.groupby(own.values())) == most


@pytest.mark.parametrize("in_background", [True, False])
def test_each_checkpoint_that_is_deleted_is_a_line_in_the_log(tmp_path, caplog, in_background):
    caplog.set_level(logging.INFO)
    with AsyncSaver(tmp_path, keep=2, in_background=in_background) as saver:
        for step in (1, 2, 3, 4):
            saver.save(step, weights(step, size=300))
        saver.wait()
    lines = [f"deleted checkpoint-{step} (keep: 2)" for step in (1, 2)]
    assert [text for text in caplog.messages if text.startswith("deleted")] == lines
    policy = RetentionPolicy(keep=1, keep_every=4)
    with AsyncSaver(tmp_path, keep=policy, resumed_from=tmp_path / "checkpoint-4") as saver:
        saver.delete_old()
    assert caplog.messages[-1] == "deleted checkpoint-3 (keep: 1, keep_every: 4)"


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_folder_that_is_renamed_under_a_run_is_not_made_anew(tmp_path, comes_back):
    root, other = tmp_path / "run", tmp_path / "other"
    with AsyncSaver(root) as saver:
        saver.save(1, weights(1))
        saver.wait()
        root.rename(other)
        with pytest.raises(CheckpointError, match=rf"{root}: .* renamed to {other}"):
            saver.save(2, weights(2))
        assert not root.exists()
        if comes_back:
            other.rename(root)
            saver.save(3, weights(3))
    assert steps(root if comes_back else other) == ([1, 3] if comes_back else [1])


def test_a_folder_that_is_removed_under_a_run_is_not_made_anew(tmp_path):
    root = tmp_path / "run"
    with AsyncSaver(root) as saver:
        saver.save(1, weights(1))
        saver.wait()
        shutil.rmtree(root)
        with pytest.raises(CheckpointError, match="removed, with the checkpoints in it"):
            saver.save(2, weights(2))
        root.mkdir()
        with pytest.raises(CheckpointError, match="removed, with the checkpoints in it"):
            saver.save(2, weights(2))
    assert not list(root.iterdir())


@pytest.mark.cold_writer
def test_a_writer_that_hangs_is_named_killed_and_replaced(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(writer_process, "_PAUSE", 0.05)
    monkeypatch.setattr(writer_process, "_WARNING", 0.2)
    monkeypatch.setattr(writer_process, "_PATIENCE", 3.0)
    with AsyncSaver(tmp_path) as saver:
        saver.save(1, weights(1))
        saver.wait()
        pid = saver._flight.pid
        os.kill(pid, signal.SIGSTOP)
        saver.save(2, weights(2))
        assert saver.wait() == [tmp_path / "checkpoint-2"]
    assert (
        f"checkpoint-2: the writer process (pid {pid}, stopped) has written nothing" in caplog.text
    )
    assert "was killed: it wrote nothing for" in caplog.text


def test_only_what_the_rule_keeps_stays(tmp_path):
    with AsyncSaver(tmp_path, keep=2) as saver:
        for step in range(1, 6):
            saver.save(step, weights(step), protected=[2])
    assert steps(tmp_path) == [2, 4, 5]


def test_the_best_stay(tmp_path):
    rule = RetentionPolicy(keep=1, keep_best=2)
    metrics = {1: 0.1, 2: 0.5, 3: 0.4, 4: 0.2, 5: 0.3}
    with AsyncSaver(tmp_path, keep=rule, greater_is_better=True) as saver:
        for step in metrics:
            known = {s: m for s, m in metrics.items() if s <= step}
            saver.save(step, weights(step), metrics=known)
    assert steps(tmp_path) == [2, 3, 5]


def test_the_one_resumed_from_stays(tmp_path):
    with AsyncSaver(tmp_path) as saver:
        for step in (1, 2):
            saver.save(step, weights(step))
    with AsyncSaver(tmp_path, keep=1, resumed_from=recover_latest(tmp_path)) as saver:
        saver.delete_old()
        assert steps(tmp_path) == [2]
        for step in (3, 4):
            saver.save(step, weights(step))
    assert steps(tmp_path) == [2, 4]


def test_ages_are_read_from_the_checkpoints(tmp_path):
    with AsyncSaver(tmp_path, keep=RetentionPolicy(keep=1, keep_hours=1.0)) as saver:
        saver.save(1, weights(1))
    with AsyncSaver(tmp_path, keep=RetentionPolicy(keep=1, keep_hours=1e-9)) as saver:
        saver.save(2, weights(2))
    assert steps(tmp_path) == [2]


def test_in_the_foreground_a_save_is_there_when_it_returns(tmp_path):
    with AsyncSaver(tmp_path, in_background=False) as saver:
        saver.save(1, weights(1))
        assert steps(tmp_path) == [1]
        assert saver.poll() == [tmp_path / "checkpoint-1"]


@pytest.mark.parametrize("has_memory", [True, False])
def test_without_room_or_shared_memory_training_waits_and_is_told_once(
    has_memory, tmp_path, caplog, monkeypatch
):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(snapshot_buffer, "free_memory", lambda: 1000)
    if not has_memory:
        monkeypatch.delattr(os, "memfd_create")
    with AsyncSaver(tmp_path) as saver:
        for step in (1, 2):
            saver.save(step, weights(step))
            assert steps(tmp_path)[-1] == step
    assert caplog.text.count("training wait for every save") == 1


@pytest.mark.parametrize(("free", "fitting"), [(3.5, 3), (2.5, 2), (40, 4)])
def test_ranks_that_allocate_at_once_do_not_all_take_the_same_free_memory(
    free, fitting, tmp_path, monkeypatch
):
    """Four ranks, each of which needs a unit, and a machine whose memory is a folder of files."""
    unit, ranks = snapshot_buffer._SPARE + 4096, 4
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    taken = tmp_path / "taken"
    taken.mkdir()
    monkeypatch.setattr(
        snapshot_buffer, "free_memory", lambda: int((free - len(list(taken.iterdir()))) * unit)
    )
    together = multiprocessing.get_context("fork").Barrier(ranks)

    def fallocate(descriptor, offset, length):
        time.sleep(0.05)
        (taken / str(os.getpid())).touch()

    def rank():
        monkeypatch.setattr(os, "posix_fallocate", fallocate)
        monkeypatch.setattr(snapshot_buffer.SnapshotBuffer, "__init__", lambda *_: None)
        together.wait()
        with contextlib.suppress(MemoryError):
            snapshot_buffer.SnapshotBuffer.create(4096)

    started = [multiprocessing.get_context("fork").Process(target=rank) for _ in range(ranks)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert len(list(taken.iterdir())) == fitting


OTHER = """
import sys
from surefoot.checkpoint import AsyncSaver
with AsyncSaver(sys.argv[1]):
    print("open", flush=True)
    sys.stdin.readline()
"""


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path):
    other = [sys.executable, "-c", OTHER, str(tmp_path)]
    with warm.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout.readline() == b"open\n"
        with pytest.raises(CheckpointError, match="another process is saving here"):
            AsyncSaver(tmp_path)
        first.kill()
    with AsyncSaver(tmp_path) as saver:
        saver.save(1, weights(1))
    assert steps(tmp_path) == [1]


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot save to"):
        AsyncSaver(tmp_path / "file" / "run")


LOOP = """
import sys, torch
from surefoot.checkpoint import AsyncSaver, load, recover_latest
root = sys.argv[1]
model = torch.nn.Linear(200, 200)
count = torch.zeros(1, dtype=torch.int64)
model.register_buffer("count", count)
found = recover_latest(root)
if found:
    load(found, {"model": model})
with AsyncSaver(root, keep=2, resumed_from=found) as saver:
    while True:
        model.count += 1
        torch.nn.init.constant_(model.weight, float(model.count))
        saver.save(int(model.count), {"model": model})
        print(int(model.count), flush=True)
"""


def test_a_killed_loop_goes_on_from_its_last_snapshot_or_the_one_before(tmp_path):
    last = 0
    for lines in (1, 4, 6):
        loop = [sys.executable, "-c", LOOP, str(tmp_path)]
        with warm.Popen(loop, stdout=subprocess.PIPE, text=True) as run:
            seen = [int(run.stdout.readline()) for _ in range(lines)]
            run.kill()
        assert seen == list(range(last + 1, last + 1 + lines))
        found = recover_latest(tmp_path)
        model = torch.nn.Linear(200, 200)
        model.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        if found is None:  # killed while the writer of the very first one was starting
            continue
        load(found, {"model": model})
        last = int(model.count)
        assert last >= seen[-1] - 1
        assert (model.weight == last).all()


class Follower:
    """Keeps some steps elsewhere, and holds back deletions until it has finished."""

    def __init__(self, steps=(), protected=()):
        self.steps, self.protected, self.events = set(steps), set(protected), []

    def on_save(self, replaces):
        self.events.append(("save", list(replaces)))

    def on_committed(self, path, replaces):
        assert verify(path, full=True).ok, "it is told of what is on the disk"
        self.events.append((path.name, list(replaces)))

    def on_deleted(self, names):
        self.events.append(("deleted", list(names)))

    def on_poll(self):
        self.events.append("poll")

    def finish(self):
        self.protected = set()


def test_a_listener_follows_every_save_from_its_start_to_its_commit(tmp_path):
    follower = Follower()
    with AsyncSaver(tmp_path, keep=1, listeners=(follower,)) as saver:
        saver.save(1, weights(1))
        saver.wait()
        saver.save(2, weights(2))
        saver.wait()
    assert follower.events == [
        ("save", []),
        ("checkpoint-1", []),
        "poll",
        ("save", ["checkpoint-1"]),
        ("checkpoint-2", ["checkpoint-1"]),
        "poll",
    ]


def test_what_a_listener_protects_stays_until_it_has_finished(tmp_path):
    follower = Follower(protected={1})
    with AsyncSaver(tmp_path, keep=1, listeners=(follower,)) as saver:
        for step in (1, 2, 3):
            saver.save(step, weights(step))
        saver.wait()
        assert steps(tmp_path) == [1, 3]
        saver.finish()
        assert steps(tmp_path) == [3]
    assert follower.events[-1] == ("deleted", ["checkpoint-1"])


def test_what_a_listener_keeps_elsewhere_falls_under_the_same_policy(tmp_path):
    follower = Follower(steps={1, 2})
    with AsyncSaver(tmp_path, keep=2, listeners=(follower,)) as saver:
        saver.save(3, weights(3))
    assert follower.events[0] == ("save", ["checkpoint-1"])


def test_a_deletion_that_a_listener_has_yet_to_follow_is_one_line(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    follower = Follower()
    with AsyncSaver(tmp_path, keep=1, listeners=(follower,)) as saver:
        for step in (1, 2, 3):
            follower.steps.add(step)  # is not deleted there yet
            saver.save(step, weights(step))
            saver.wait()
    lines = [f"deleted checkpoint-{step} (keep: 1)" for step in (1, 2)]
    assert [text for text in caplog.messages if text.startswith("deleted")] == lines


def test_a_saver_that_continues_after_an_error_logs_it_and_saves_the_next_step(tmp_path, caplog):
    (tmp_path / "checkpoint-2").mkdir()
    with AsyncSaver(tmp_path, on_error="continue") as saver:
        for step in (1, 2, 3):
            saver.save(step, weights(step))
    assert saver.newest == tmp_path / "checkpoint-3"
    assert "checkpoint-2: it exists already" in caplog.text


def test_a_checkpoint_of_another_trainer_is_the_parent_but_not_the_newest(tmp_path):
    foreign = tmp_path / "theirs" / "checkpoint-7"
    with AsyncSaver(tmp_path / "run", resumed_from=foreign, is_foreign=True) as saver:
        assert saver.newest is None
        saver.save(8, weights(8))
    assert open_checkpoint(saver.newest).manifest.parent == "checkpoint-7"


def test_a_caller_that_holds_the_lock_of_the_folder_keeps_it(tmp_path):
    with AsyncSaver(tmp_path, has_lock=True):
        assert not (tmp_path / ".lock").exists()
