"""A save in another process is the save of this one, whatever happens to either of them."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import warm
from surefoot.checkpoint.disk.commit import being_written, clean, committed
from surefoot.checkpoint.loading import load
from surefoot.checkpoint.saving._snapshot_buffer import (
    FileImages,
    JobSnapshot,
    SnapshotBuffer,
    places,
)
from surefoot.checkpoint.saving._writer_process import Background, take
from surefoot.checkpoint.saving.preparation import prepare, save
from surefoot.checkpoint.verification import verify
from surefoot.errors import CheckpointError

from ..sample import Holder, blank, same_states, sample_states, tree_bytes

pytestmark = [
    pytest.mark.cold_writer,
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux's"),
]
TESTS = Path(__file__).parents[2]
COMPANIONS = {"config.json": b"{}", "templates/chat.jinja": b"{{ messages }}"}


@pytest.fixture
def background():
    made = Background()
    yield made
    made.close()


def begin(background, root, step, states=None, **options):
    job, live = prepare(root, step, states or sample_states(step), **options)
    background.start(job, live)


def test_it_writes_what_a_synchronous_save_writes(tmp_path, background):
    options = {"companions": COMPANIONS, "max_shard_size": 700}
    begin(background, tmp_path / "a", 1, **options)
    saved = background.wait()
    save(tmp_path / "b", 1, sample_states(1), **options)
    assert saved.path == tmp_path / "a" / "checkpoint-1"
    ours, theirs = tree_bytes(saved.path), tree_bytes(tmp_path / "b" / "checkpoint-1")
    assert saved.num_bytes == sum(len(d) for n, d in ours.items() if n != "manifest.json")
    for content in (ours, theirs):
        manifest = json.loads(content["manifest.json"])
        content["manifest.json"] = {**manifest, "created": "", "seal": ""}
    assert ours == theirs


def test_tensors_of_any_layout_in_memory_are_saved_by_value(tmp_path, background):
    base = torch.randn(4, 6)
    model = {"t": base.T, "cut": base[1:3, ::2], "expanded": torch.ones(1).expand(5)}
    model |= {"conj": torch.randn(3, dtype=torch.complex64).conj(), "none": torch.empty(0, 3)}
    begin(background, tmp_path, 1, {"model": Holder(model)})
    background.wait()
    into = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in model.items()}
    load(tmp_path / "checkpoint-1", {"model": Holder(into)})
    for name, tensor in model.items():
        assert torch.equal(into[name], tensor), name


def test_a_state_that_grows_gets_more_memory(tmp_path, background):
    for step, scale in enumerate((1, 64, 1, 512), start=1):
        begin(background, tmp_path, step, sample_states(step, scale))
        background.wait()
        fresh = blank(sample_states(step, scale))
        load(tmp_path / f"checkpoint-{step}", fresh)
        assert same_states(sample_states(step, scale), fresh)


def test_a_writer_that_dies_again_and_again_is_told(tmp_path, background, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    begin(background, tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"checkpoint-1: .* ended with exit code 1"):
        background.wait()
    monkeypatch.undo()
    begin(background, tmp_path, 1)
    assert background.wait().path.is_dir()


def test_a_writer_that_cannot_be_started_is_told(tmp_path, background, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="cannot start the writer process"):
        begin(background, tmp_path, 1)
    assert background.wait() is None  # nothing is in flight


def test_a_save_whose_writer_cannot_be_started_is_synchronous(
    tmp_path, background, monkeypatch, caplog
):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    job, live = prepare(tmp_path, 1, sample_states(1))
    saved = background.save(job, live)
    assert verify(saved.path, full=True).ok
    assert background.is_off
    assert "training wait for every save: cannot start the writer process" in caplog.text


def test_a_writer_that_died_between_two_saves_is_replaced(tmp_path, background):
    begin(background, tmp_path, 1)
    background.wait()
    os.kill(background.pid, signal.SIGKILL)
    begin(background, tmp_path, 2)
    background.wait()
    assert [p.name for p in committed(tmp_path)] == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_meant_for_the_trainer_do_not_end_the_writer(tmp_path, background, number):
    begin(background, tmp_path, 1)
    background.wait()
    begin(background, tmp_path, 2, sample_states(2, 2000))
    os.kill(background.pid, number)
    assert background.wait().path.is_dir()


def test_a_state_larger_than_the_memory_is_refused_before_anything_is_touched():
    with pytest.raises(MemoryError, match="are needed"):
        SnapshotBuffer.create(1 << 60)


def run(script, *args, **options):
    return warm.run(
        [sys.executable, "-c", script, *map(str, args)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        **options,
    )


DIES = """
import os, signal, sys
from pathlib import Path
from checkpoint.sample import sample_states
from checkpoint.saving.test_writer_process import begin
from surefoot.checkpoint.saving._writer_process import Background
root, background = Path(sys.argv[1]), Background()
begin(background, root, 1)
background.wait()
begin(background, root, 2, sample_states(2, 100_000))
while not any(root.glob(".*.part/*.safetensors")):
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_save_in_flight_is_committed_even_if_the_trainer_is_killed(tmp_path):
    assert run(DIES, tmp_path).returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while being_written(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [p.name for p in committed(tmp_path)] == ["checkpoint-1", "checkpoint-2"]
    assert verify(tmp_path / "checkpoint-2", full=True).ok
    assert clean(tmp_path) == []


def test_a_writer_whose_trainer_died_before_the_folder_was_there_gives_up(tmp_path):
    """A run that was started again meanwhile would not know of it."""
    job, live = prepare(tmp_path, 1, sample_states(1))
    starts, size = places([shard.plan.header.file_size for shard in job.shards])
    arena = SnapshotBuffer.create(size)
    images = FileImages(arena, starts, job.shards)
    take(images, live.groups)
    message = json.dumps(JobSnapshot(job, images, {}).dump()) + "\n"
    command = [
        sys.executable,
        "-m",
        "surefoot.checkpoint.saving._writer",
        str(arena.descriptor),
        str(size),
    ]
    done = subprocess.run(
        command,
        input=message.encode(),
        pass_fds=[arena.descriptor],
        capture_output=True,
        check=True,
    )
    assert done.stdout == b""
    assert list(tmp_path.iterdir()) == []
    arena.close()


def test_what_the_disk_refuses_is_told_in_words(tmp_path, background):
    begin(background, tmp_path, 1, sample_states(1, 2000))
    background.wait()
    resource.prlimit(background.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    begin(background, tmp_path, 2, sample_states(2, 2000))
    with pytest.raises(CheckpointError, match=r"checkpoint-2.*does not allow files this large"):
        background.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]
