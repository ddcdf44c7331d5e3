"""What network disks do: no locks, no links, no flushed folders, deleted files that keep a name."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from checkpoint.sample import sample_states
from surefoot.checkpoint.disk.commit import clean, delete
from surefoot.checkpoint.disk.retention import RetentionPolicy
from surefoot.checkpoint.looking.listing import PruneOptions, plan_pruning, untrained
from surefoot.checkpoint.saving.preparation import save
from surefoot.checkpoint.verification import verify
from surefoot.errors import CheckpointError, explain
from surefoot.storage import files, folder_lock


def refusing(code):
    def call(*_, **__):
        raise OSError(code, os.strerror(code))

    return call


class NetworkSystem:
    """The system's calls on a disk that can do little. A deleted file that this process has open
    gets another name, which cannot be deleted before it is closed."""

    def __init__(self, code):
        self.code, self.descriptors, self.kept = code, {}, {}

    def __getattr__(self, name):
        return getattr(os, name)

    def link(self, *_, **__):
        raise OSError(self.code, os.strerror(self.code))

    def fsync(self, descriptor):
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            raise OSError(self.code, os.strerror(self.code))
        os.fsync(descriptor)

    def unlink(self, path, **options):
        status = os.lstat(path)
        opened = [d for d in Path("/proc/self/fd").iterdir() if self._is(d.name, status)]
        if not opened:
            os.unlink(path, **options)
        elif Path(path).name.startswith(".nfs"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        else:
            Path(path).rename(Path(path).with_name(f".nfs{status.st_ino:016x}"))

    def _is(self, descriptor, status):
        try:
            return os.path.samestat(os.fstat(int(descriptor)), status)
        except OSError:
            return False


@pytest.fixture(
    params=[errno.ENOTSUP, errno.EINVAL, errno.ENOSYS], ids=["NOTSUP", "INVAL", "NOSYS"]
)
def network(request, monkeypatch):
    monkeypatch.setattr(files, "os", NetworkSystem(request.param))
    for name in ("flock", "lockf", "ioctl"):
        monkeypatch.setattr(fcntl, name, refusing(request.param))
    monkeypatch.setattr(files, "_DIRECT", 0)
    return request.param


def test_checkpoints_are_saved_pruned_and_cleaned_up(network, tmp_path, caplog):
    folder_lock.lock(tmp_path, CheckpointError, doing="", taken="").file.close()
    for step in (1, 2, 3):
        save(tmp_path, step, sample_states(step))
    assert clean(tmp_path) == []
    with untrained(tmp_path):
        rule = RetentionPolicy(keep=1)
        plan_pruning(tmp_path, PruneOptions(rule, "eval_loss", greater=False)).remove()
    assert "this file system has none" in caplog.text
    assert verify(tmp_path / "checkpoint-3", full=True).ok
    assert [p.name for p in tmp_path.iterdir() if p.name != ".lock"] == ["checkpoint-3"]


@pytest.fixture
def silly(monkeypatch):
    """A disk with locks, where deleted files that are open keep a name."""
    monkeypatch.setattr(files, "os", NetworkSystem(errno.ENOTSUP))


def part(root, content=b""):
    folder = root / ".checkpoint-4.0badcafe.part"
    (folder / "rank_00000").mkdir(parents=True)
    (folder / "rank_00000" / "model.safetensors").write_bytes(b"x")
    (folder / "manifest.json").write_bytes(content)
    return folder


def test_the_temporary_folder_of_a_dead_process_is_removed(silly, tmp_path):
    assert clean(tmp_path) == [] != [part(tmp_path)] == clean(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_somebody_reads_stops_no_resume(silly, tmp_path):
    folder = part(tmp_path)
    with (folder / "rank_00000" / "model.safetensors").open():
        assert clean(tmp_path) == []
    assert clean(tmp_path) == [folder]


def test_a_checkpoint_that_somebody_reads_is_deleted_later(silly, tmp_path):
    saved = save(tmp_path, 1, sample_states(1))
    with (saved / "model.safetensors").open(), pytest.raises(OSError, match="busy") as caught:
        delete(saved)
    assert "another process still has it open" in explain(caught.value)
    assert not saved.exists()
    assert len(clean(tmp_path)) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_link_whose_answer_was_lost_is_a_link(tmp_path, monkeypatch):
    class Lossy(NetworkSystem):
        def link(self, old, new, **options):
            os.link(old, new, **options)
            raise OSError(errno.EEXIST, "File exists")

    monkeypatch.setattr(files, "os", Lossy(errno.ENOTSUP))
    monkeypatch.setattr(fcntl, "ioctl", refusing(errno.ENOTSUP))
    (tmp_path / "a").write_bytes(b"a")
    assert files.share(tmp_path / "a", tmp_path / "b")
    (tmp_path / "c").write_bytes(b"c")
    monkeypatch.setattr(Lossy, "link", refusing(errno.EEXIST))
    assert not files.share(tmp_path / "a", tmp_path / "c")


@pytest.mark.parametrize("call", ["preadv", "pwrite", "fsync", "rename", "listdir"])
def test_a_stale_handle_is_one_sentence(call, tmp_path, monkeypatch):
    saved = save(tmp_path, 1, sample_states(1))

    class Stale(NetworkSystem):
        pass

    setattr(Stale, call, refusing(errno.ESTALE))
    monkeypatch.setattr(files, "os", Stale(errno.ENOTSUP))
    with pytest.raises(CheckpointError, match="another machine has replaced or removed it"):
        if call == "preadv":
            found = verify(saved, full=True)
            raise CheckpointError(found.problems[0])
        save(tmp_path, 2, sample_states(2))
        clean(tmp_path)
    assert not (tmp_path / "checkpoint-2").exists()
