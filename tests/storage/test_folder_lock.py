"""One kind of lock, between processes: of a run, of a program that saves, of whoever looks."""

import os
import signal
import subprocess
import sys
import time

import pytest

import warm
from surefoot.checkpoint import AsyncSaver
from surefoot.checkpoint.looking.listing import untrained
from surefoot.errors import CheckpointError, RunError
from surefoot.run.folder import _locked
from surefoot.storage.folder_lock import NAME, is_held, lock

PROGRAM = """
import sys
from pathlib import Path
from surefoot.checkpoint import AsyncSaver
from surefoot.run.folder import _locked
with {}(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("holder", ["AsyncSaver", "_locked"])
def test_a_run_and_a_program_that_saves_see_each_other(tmp_path, holder):
    """Two processes: ``lockf`` and ``flock`` would both succeed."""
    command = [sys.executable, "-c", PROGRAM.format(holder), str(tmp_path)]
    with warm.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        assert is_held(tmp_path / NAME) is True
        with pytest.raises(CheckpointError, match="another process is saving here"):
            AsyncSaver(tmp_path)
        with pytest.raises(RunError, match="another process is training in"):
            _locked(tmp_path).__enter__()
        with pytest.raises(CheckpointError, match="a process is training there"):
            untrained(tmp_path).__enter__()
        process.kill()
    assert is_held(tmp_path / NAME) is False
    with AsyncSaver(tmp_path), pytest.raises(RunError):
        _locked(tmp_path).__enter__()
    with _locked(tmp_path), pytest.raises(CheckpointError):
        AsyncSaver(tmp_path)


def taken(folder):
    return lock(folder, CheckpointError, doing="cannot lock", taken="taken")


def test_a_child_that_outlives_its_parent_has_no_lock(tmp_path):
    """Such as a worker of a data loader; neither does it release that of the parent."""
    held = taken(tmp_path)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    assert is_held(tmp_path / NAME) is True
    held.file.close()
    deadline = time.monotonic() + 20  # until the child has begun
    while is_held(tmp_path / NAME) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_held(tmp_path / NAME) is False
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_lock_is_a_regular_file_of_its_folder(tmp_path, kind):
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    if kind == "link":
        (run / NAME).symlink_to(other)
    elif kind == "pipe":
        os.mkfifo(run / NAME)
    else:
        (run / NAME).mkdir()
    assert is_held(run / NAME) is None
    with pytest.raises(CheckpointError, match="cannot lock"):
        taken(run)
    assert not other.exists()
