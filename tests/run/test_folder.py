"""All processes of a run must see one folder: each writes its part of every checkpoint there."""

import errno
import fcntl
import json
import logging
import os
import threading
import time
from dataclasses import dataclass

import pytest

import ranks
from crash.system import But, refusing
from surefoot.checkpoint.disk.manifest import MANIFEST
from surefoot.data.section import DataSection
from surefoot.errors import RunError
from surefoot.methods import Full
from surefoot.model.section import ModelSection
from surefoot.optim._variants.adamw import AdamW
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe import Recipe, dump, read
from surefoot.run import folder as run_folder
from surefoot.stages import GRPO, SFT, STAGES
from surefoot.storage import files
from surefoot.storage.child import LAUNCHER
from surefoot.storage.folder_lock import lock
from surefoot.training.callbacks.launches import HEARTBEAT, LaunchFiles
from surefoot.training.section import TrainSection


def recipe(folder):
    return Recipe(
        model=ModelSection(path="unused"),
        data=DataSection(datasets=("unused",)),
        method=Full(),
        stage=SFT(),
        train=TrainSection(output_dir=folder),
        optim=AdamW(),
    )


def why(world, folder):
    """What opening ``folder`` says."""
    try:
        with run_folder.opened(recipe(folder), world):
            return sorted(path.name for path in folder.iterdir())
    except RunError as error:
        return str(error)


@dataclass(frozen=True, kw_only=True)
class Mine(GRPO):
    """A stage of a package, with the sampler of all that sample."""


@pytest.mark.parametrize("name", ["grpo", "mine"])
def test_the_server_of_any_stage_may_move(name, tmp_path, monkeypatch):
    """A setting may change by what is said where it is declared, not by a list of names."""
    monkeypatch.setitem(STAGES.own, "mine", Mine)
    (tmp_path / "r.py").write_text("def f(completions): return [0.0] * len(completions)")

    def with_stage(url, **settings):
        stage = {"reward": f"{tmp_path}/r.py:f", "sampler": {"vllm": {"url": url}}, **settings}
        return read({**sections, "stage": {name: stage}, "train": {"output_dir": tmp_path / "run"}})

    sections = {"model": {"path": "unused"}, "data": {"datasets": ["unused"]}}
    (tmp_path / "run" / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-1" / MANIFEST).touch()
    (tmp_path / "run" / "recipe.yaml").write_text(dump(with_stage("http://here:8000")))
    with run_folder.opened(with_stage("http://there:8000")):
        pass
    another = with_stage("http://here:8000", group_size=7)
    with pytest.raises(RunError, match=f"stage.{name}.group_size: "), run_folder.opened(another):
        pass


def test_two_that_see_one_folder_leave_nothing_but_the_lock(tmp_path):
    assert ranks.run(2, lambda world: why(world, tmp_path / "run")) == [[".lock"], [".lock"]]


def test_folders_of_two_machines_are_refused_by_both(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "_SIGHT", 0.2)
    found = ranks.run(2, lambda world: why(world, tmp_path / str(world.rank)))
    for rank, said in enumerate(found):
        assert f"rank 1 does not see the folder {tmp_path / str(rank)} of rank 0" in said
        assert "train.output_dir to the URL of a bucket" in said


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_without_locks_a_run_starts_and_says_what_is_not_noticed(
    code, tmp_path, monkeypatch, caplog
):
    def flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING):
        assert why(ALONE, tmp_path / "run") == [".lock"]
    assert "this file system has no locks" in caplog.text


@pytest.fixture
def restarted(monkeypatch, tmp_path):
    """Started by a launcher, while this very process has the lock, and a heartbeat in step 7."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(run_folder, "_LOOK", 0.02)
    monkeypatch.setattr(run_folder, "_LAST_STEP", 0.3)
    monkeypatch.setattr(run_folder, "_HANDOVER", 10.0)
    LaunchFiles(tmp_path).beat(7, 9)
    with lock(tmp_path, RunError, doing="", taken="") as held:
        yield held


def test_who_is_restarted_waits_for_the_last_save_of_the_launch_before(restarted, tmp_path, caplog):
    timer = threading.Timer(0.8, lambda: (LaunchFiles(tmp_path).beat(8, 9), restarted.file.close()))
    timer.start()
    assert ".lock" in why(ALONE, tmp_path)
    assert caplog.text.count("has the lock of") == 1
    assert f"process {os.getpid()} on " in caplog.text


@pytest.mark.usefixtures("restarted")
def test_a_launch_that_takes_steps_is_not_waited_for(tmp_path):
    steps, is_over = LaunchFiles(tmp_path), threading.Event()

    def train():
        step = 7
        while not is_over.wait(0.05):
            steps.beat(step := step + 1, 10**6, is_due=True)

    trainer = threading.Thread(target=train)
    trainer.start()
    began = time.monotonic()
    assert "another process is training in" in why(ALONE, tmp_path)
    assert 0.3 < time.monotonic() - began < 8
    is_over.set()
    trainer.join()


@pytest.mark.usefixtures("restarted")
@pytest.mark.parametrize("because", ["limit", "dead", "no heartbeat", "no launcher", "ours"])
def test_a_lock_is_waited_for_only_while_its_holder_lives_and_a_launcher_restarts(
    because, tmp_path, monkeypatch, caplog
):
    if because == "limit":
        monkeypatch.setattr(run_folder, "_HANDOVER", 0.5)
    if because == "dead":
        beat = json.loads((tmp_path / HEARTBEAT).read_text())
        (tmp_path / HEARTBEAT).write_text(json.dumps({**beat, "pid_started": "another/1"}))
    if because == "no heartbeat":
        (tmp_path / HEARTBEAT).unlink()
    if because == "no launcher":
        monkeypatch.delenv("RANK")
    if because == "ours":
        monkeypatch.setenv(LAUNCHER, str(os.getppid()))
    assert "another process is training in" in why(ALONE, tmp_path)
    assert ("has the lock of" in caplog.text) == (because == "limit")


def test_a_lock_that_fails_is_one_sentence(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(fcntl, "flock", flock)
    found = why(ALONE, tmp_path / "run")
    assert found.startswith(f"train.output_dir: cannot lock {tmp_path / 'run'}: ")
    assert "another machine has replaced or removed it" in found


class Streamed:
    """``os`` on a bucket that is mounted without a cache (rclone, goofys): a file is written once,
    from its beginning to its end."""

    def pwrite(self, descriptor, data, offset):
        if offset != os.fstat(descriptor).st_size:
            raise OSError(errno.ESPIPE, os.strerror(errno.ESPIPE))
        return os.pwrite(descriptor, data, offset)

    def __getattr__(self, name):
        return getattr(os, name)


def refused_append(path, flags, *mode, **options):
    if flags & os.O_APPEND:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
    return os.open(path, flags, *mode, **options)


MOUNTS = {
    "streamed": Streamed(),
    "no append": But(open=refused_append),  # Mountpoint for Amazon S3
    "lost append": But(write=lambda descriptor, data: len(data)),
    "no rename": But(rename=refusing(errno.ENOSYS)),
}


@pytest.mark.parametrize("mount", MOUNTS)
def test_a_mount_that_cannot_take_a_run_is_named_before_anything_with_its_cure(
    mount, tmp_path, monkeypatch
):
    monkeypatch.setattr(files, "os", MOUNTS[mount])
    said = why(ALONE, tmp_path / "run")
    assert f"{tmp_path / 'run'} is on a file system that cannot overwrite, append to and" in said
    assert "set train.output_dir to the URL of the bucket (s3://..., gs://...), or to a" in said
    assert not list((tmp_path / "run").iterdir())


def test_a_cache_on_such_a_mount_is_named_as_that(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "os", MOUNTS["streamed"])
    with pytest.raises(RunError, match=r"without a cache; set train\.cache_dir to a folder on a"):
        run_folder._must_take_writes(tmp_path, is_cache=True, shares=True)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_is_full_or_read_only_is_no_bucket(code, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "os", But(pwrite=refusing(code)))
    said = why(ALONE, tmp_path / "run")
    assert said.startswith(f"train.output_dir: cannot write in {tmp_path / 'run'}: ")
    assert "bucket" not in said
