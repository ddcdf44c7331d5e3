"""A folder becomes a checkpoint at one stroke; what is cut short is cleaned, what lives is not."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from crash.system import But, refusing
from surefoot.checkpoint.disk.commit import (
    clean,
    clean_leftovers,
    committed,
    delete,
    is_being_written,
    is_leftover,
    mark_damaged,
    named,
    new_folder,
    step_of,
    temporary_folder,
)
from surefoot.errors import CheckpointError
from surefoot.storage import files


def names(root):
    return sorted(p.name for p in root.iterdir())


def publish(root, step, content=b"{}"):
    target = root / f"checkpoint-{step}"
    with temporary_folder(target) as part:
        files.write_new(part.folder / "file", b"x")
        part.commit(target, content)
    return target


def test_a_committed_folder_has_its_name_and_its_manifest(tmp_path):
    target = publish(tmp_path, 5)
    assert names(target.parent) == ["checkpoint-5"]
    assert (target / "manifest.json").read_bytes() == b"{}"
    assert committed(target.parent) == [target]


def test_the_folder_around_it_is_never_made(tmp_path):
    with pytest.raises(FileNotFoundError):
        publish(tmp_path / "gone", 5)
    assert names(tmp_path) == []


def test_before_the_commit_there_is_no_checkpoint(tmp_path):
    with temporary_folder(tmp_path / "checkpoint-5") as part:
        assert part.folder.name.startswith(".checkpoint-5.")
        assert named(tmp_path) == committed(tmp_path) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_what_is_not_committed_is_removed(tmp_path, error):
    with pytest.raises(error), temporary_folder(tmp_path / "checkpoint-5") as part:
        files.write_new(part.folder / "file", b"x")
        raise error
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "make", [lambda p: p.mkdir(), lambda p: p.write_text("x"), lambda p: p.symlink_to("no")]
)
def test_what_has_the_name_already_is_never_replaced(tmp_path, make):
    target = tmp_path / "checkpoint-5"
    with pytest.raises(CheckpointError, match="exists already"), temporary_folder(target) as part:
        make(target)
        part.commit(target, b"{}")
    assert names(tmp_path) == ["checkpoint-5"]
    assert not (target / "manifest.json").exists()


def test_folders_inside_are_committed_with_it(tmp_path):
    target = tmp_path / "checkpoint-1"
    with temporary_folder(target) as part:
        files.make_folder(part.folder / "sub" / "deep")
        files.write_new(part.folder / "sub" / "deep" / "file", b"x")
        part.commit(target, b"{}")
    assert (target / "sub" / "deep" / "file").read_bytes() == b"x"


def test_checkpoints_are_listed_by_step_not_by_name(tmp_path):
    for step in (100, 20, 3):
        publish(tmp_path, step)
    (tmp_path / "checkpoint-50").mkdir()
    for other in (
        "checkpoint-",
        "checkpoint-1x",
        "checkpoint--1",
        "checkpoint-007",
        "xcheckpoint-1",
        "checkpoint-1.damaged",
    ):
        (tmp_path / other).mkdir()
    (tmp_path / "checkpoint-60").write_text("a file")
    assert [p.name for p in committed(tmp_path)] == [
        "checkpoint-3",
        "checkpoint-20",
        "checkpoint-100",
    ]
    assert [step_of(p) for p in named(tmp_path)] == [3, 20, 50, 100]
    assert committed(tmp_path / "none") == named(tmp_path / "none") == []


def test_the_folder_of_a_living_process_is_not_cleaned(tmp_path):
    with temporary_folder(tmp_path / "checkpoint-5") as part:
        assert clean(tmp_path) == []
        assert part.folder.exists()
        part.commit(tmp_path / "checkpoint-5", b"{}")
    assert clean(tmp_path) == []
    assert names(tmp_path) == ["checkpoint-5"]


def test_the_folder_of_a_killed_process_is_cleaned(tmp_path):
    code = "import os, sys; from pathlib import Path; "
    code += "from surefoot.checkpoint.disk.commit import temporary_folder; "
    code += (
        "part = temporary_folder(Path(sys.argv[1]) / 'checkpoint-5'); part.__enter__(); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    assert is_leftover(left.name)
    assert clean(tmp_path) == [left]
    assert names(tmp_path) == []


def test_the_folder_of_another_living_process_is_not_cleaned(tmp_path):
    code = "import sys; from pathlib import Path; "
    code += "from surefoot.checkpoint.disk.commit import temporary_folder\n"
    code += "with temporary_folder(Path(sys.argv[1]) / 'checkpoint-5'):\n"
    code += "    print('in', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        assert clean(tmp_path) == []
        assert len(names(tmp_path)) == 1
        other.stdin.close()
        other.wait()


def test_parts_without_a_manifest_are_cleaned(tmp_path):
    """Killed before it was made, or the power failed before it was flushed."""
    (tmp_path / ".checkpoint-1.0a.part").mkdir()
    (tmp_path / ".checkpoint-2.0b.part").mkdir()
    files.write_new(tmp_path / ".checkpoint-2.0b.part" / "model.safetensors", b"x")
    assert len(clean(tmp_path)) == 2
    assert names(tmp_path) == []


def test_half_forgotten_checkpoints_are_cleaned(tmp_path):
    gone = tmp_path / ".checkpoint-1.0a.forgotten"
    gone.mkdir()
    files.write_new(gone / "manifest.json", b"{}")
    assert clean(tmp_path) == [gone]


def test_nothing_else_is_cleaned(tmp_path):
    publish(tmp_path, 1)
    for other in (
        "checkpoint-2",
        ".checkpoint-3",
        "checkpoint-1.0a.part",
        ".checkpoint-x.0a.part",
        ".git",
    ):
        (tmp_path / other).mkdir()
    before = names(tmp_path)
    assert clean(tmp_path) == []
    assert names(tmp_path) == before
    assert clean(tmp_path / "none") == []


def test_a_save_starts_again_if_its_folder_is_cleaned_at_the_first_moment(tmp_path, monkeypatch):
    """Another process may clean between making the folder and locking the manifest."""
    taken = []

    def meddle(path, flags, *args, **kwargs):
        if str(path).endswith("manifest.json") and flags & os.O_CREAT and len(taken) < 2:
            taken.append(path)
            if len(taken) == 1:  # before the file is there
                path.parent.rmdir()
            else:  # after it is there, before it is locked
                descriptor = os.open(path, flags, *args, **kwargs)
                files.remove_tree(path.parent)
                return descriptor
        return os.open(path, flags, *args, **kwargs)

    monkeypatch.setattr(files, "os", But(open=meddle))
    publish(tmp_path, 5)
    assert len(taken) == 2
    assert names(tmp_path) == ["checkpoint-5"]


def test_a_save_starts_again_if_a_cleaner_has_the_lock_first(tmp_path, monkeypatch):
    held = []

    def open_second(path, flags, *args, **kwargs):
        descriptor = os.open(path, flags, *args, **kwargs)
        if flags & os.O_CREAT and not held:
            held.append(os.open(path, os.O_RDWR))
            fcntl.flock(held[0], fcntl.LOCK_EX)
        return descriptor

    monkeypatch.setattr(files, "os", But(open=open_second))
    publish(tmp_path, 5)
    os.close(held[0])
    assert len(names(tmp_path)) == 2  # the cleaner would have removed the other one
    assert len(clean(tmp_path)) == 1
    assert names(tmp_path) == ["checkpoint-5"]


def test_who_is_writing(tmp_path):
    with temporary_folder(tmp_path / "checkpoint-5") as part:
        assert is_being_written(part.folder)
        part.commit(tmp_path / "checkpoint-5", b"{}")
    assert not is_being_written(part.folder)
    assert not is_being_written(tmp_path / "checkpoint-5")


def test_cleaners_and_savers_at_once_never_harm_each_other(tmp_path):
    stop = threading.Event()
    errors = []

    def cleaning():
        while not stop.is_set():
            time.sleep(0.001)
            try:
                clean(tmp_path)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=cleaning) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for step in range(60):
            publish(tmp_path, step)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert names(tmp_path) == sorted(f"checkpoint-{step}" for step in range(60))


def test_a_folder_that_is_taken_away_again_and_again_is_an_error(tmp_path, monkeypatch):
    def steal(path, flags, *args, **kwargs):
        if flags & os.O_CREAT:
            path.parent.rmdir()
        return os.open(path, flags, *args, **kwargs)

    monkeypatch.setattr(files, "os", But(open=steal))
    with pytest.raises(CheckpointError, match="keeps deleting"):
        publish(tmp_path, 5)


def test_without_locks_a_save_works_and_nothing_is_cleaned(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    publish(tmp_path, 5)
    with temporary_folder(tmp_path / "checkpoint-6") as part:
        assert clean(tmp_path) == []
        assert part.folder.exists()


def test_a_dropped_checkpoint_is_gone(tmp_path):
    delete(publish(tmp_path, 5))
    assert names(tmp_path) == []


def test_a_damaged_checkpoint_makes_way_for_a_new_one(tmp_path):
    for expected in ("checkpoint-5.damaged", "checkpoint-5.damaged-2", "checkpoint-5.damaged-3"):
        assert mark_damaged(publish(tmp_path, 5)).name == expected
    assert committed(tmp_path) == []


def test_a_root_that_cannot_be_listed_is_an_error_of_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "os", But(listdir=refusing(errno.EACCES)))
    for function in (named, committed, clean):
        with pytest.raises(CheckpointError, match="no permission"):
            function(tmp_path)


def test_a_rename_whose_answer_was_lost_is_a_commit(tmp_path, monkeypatch):
    def rename(old, new):
        """A network disk renames, loses its answer, and is asked again: nothing is there then."""
        old.rename(new)
        old.rename(new)

    monkeypatch.setattr(files, "os", But(rename=rename))
    target = publish(tmp_path, 5)
    assert committed(tmp_path) == [target]
    assert names(target) == ["file", "manifest.json"]


def test_a_rename_that_failed_is_no_commit_even_if_somebody_else_was_faster(tmp_path, monkeypatch):
    def rename(old, new):
        new.mkdir()
        (new / "manifest.json").write_text("another's")
        raise FileExistsError(17, "File exists", str(new))

    monkeypatch.setattr(files, "os", But(rename=rename))
    with pytest.raises(OSError, match="File exists"):
        publish(tmp_path, 5)
    assert (tmp_path / "checkpoint-5" / "manifest.json").read_text() == "another's"


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
