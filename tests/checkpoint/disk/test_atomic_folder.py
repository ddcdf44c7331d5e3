"""A folder for others is whole or not there; what is cut short is cleaned, what lives is not."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from surefoot.checkpoint.disk.commit import clean, clean_leftovers, new_folder
from surefoot.errors import CheckpointError
from surefoot.storage import files

KILLED = """
import sys
from pathlib import Path
from surefoot.checkpoint.disk.commit import new_folder
with new_folder(Path(sys.argv[1])) as folder:
    (folder / "a").mkdir()
    (folder / "a" / "b").write_text("c")
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def writer(tmp_path):
    """A process that has begun to write ``checkpoint-7``."""
    command = [sys.executable, "-c", KILLED, tmp_path / "checkpoint-7"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.communicate()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write(target):
    with new_folder(target) as folder:
        (folder / "model").write_text("new")


@pytest.mark.skipif(sys.platform != "linux", reason="the lock of a folder")
def test_what_a_killed_process_left_is_removed_by_the_next(writer, tmp_path):
    target = tmp_path / "checkpoint-7"
    (left,) = names(tmp_path)
    clean_leftovers(target)
    assert clean(tmp_path) == []
    write(target)
    assert names(tmp_path) == [left, "checkpoint-7"]  # it lived
    assert names(tmp_path / left / "a") == ["b"]
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    (tmp_path / "other").mkdir()
    (tmp_path / ".other.0123abcd.part").mkdir()
    with pytest.raises(CheckpointError, match="it exists already"):
        write(target)
    (target / "model").unlink()
    target.rmdir()
    write(target)
    assert names(tmp_path) == [".other.0123abcd.part", "checkpoint-7", "other"]


def test_a_run_cleans_it_too(writer, tmp_path):
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert len(clean(tmp_path)) == 1
    assert names(tmp_path) == []


def test_an_error_leaves_nothing(tmp_path):
    with (
        pytest.raises(CheckpointError, match=r"cannot write .*out"),
        new_folder(tmp_path / "out") as folder,
    ):
        (folder / "a").write_text("b")
        raise OSError(28, "No space left on device", "out")
    assert names(tmp_path) == []


def test_an_empty_folder_may_be_filled_where_that_is_wanted(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="it exists already"):
        write(tmp_path / "out")
    with new_folder(tmp_path / "out", may_be_empty=True) as folder:
        (folder / "a").write_text("b")
    assert names(tmp_path / "out") == ["a"]
    with pytest.raises(CheckpointError, match="it exists already"):
        new_folder(tmp_path / "out", may_be_empty=True).__enter__()


def test_writers_and_cleaners_at_once_never_harm_each_other(tmp_path):
    stop, problems = threading.Event(), []

    def cleaning():
        while not stop.is_set():
            try:
                clean_leftovers(tmp_path / "out")
            except CheckpointError as error:
                problems.append(error)

    threads = [threading.Thread(target=cleaning) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(100):
        write(tmp_path / "out")
        assert (tmp_path / "out" / "model").read_text() == "new"
        (tmp_path / "out").rename(tmp_path / str(number))
    stop.set()
    for thread in threads:
        thread.join()
    assert not problems
    assert names(tmp_path) == sorted(map(str, range(100)))


def test_without_locks_it_works_and_nothing_is_removed(tmp_path, monkeypatch):
    class NoLocks:
        LOCK_EX = LOCK_NB = 0

        def flock(self, *_):
            raise OSError(9, os.strerror(9))

    monkeypatch.setattr(files, "fcntl", NoLocks())
    with new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("b")
        clean_leftovers(tmp_path / "out")
        assert names(folder) == ["a"]
    assert names(tmp_path) == ["out"]
