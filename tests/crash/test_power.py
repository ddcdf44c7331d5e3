"""The power fails after any call: what the disk had not flushed is gone, and nothing else is."""

import os
import shutil
from itertools import islice

import pytest

from surefoot.storage import files

from . import scene
from .power import Disk, write_tree


@pytest.fixture(scope="module")
def start(scratch):
    root = scratch / "start"
    return root, scene.set_up(root)


def recorded(start, root, samples=2):
    """The scene, played on a disk that is watched."""
    scene.copy_of(start[0], root)
    files.os = disk = Disk(root, samples)
    try:
        scene.act(root)
    finally:
        files.os = os
    return disk


@pytest.fixture(scope="module")
def disk(start, scratch):
    return recorded(start, scratch / "run")


def outcomes(disk):
    """Each distinct content that some power cut may leave."""
    found = {repr(content): content for moment in disk.moments for content in moment}
    return list(found.values())


def losses(disk, start, scratch):
    """What is lost, one outcome after another where something is."""
    for content in outcomes(disk):
        root = scratch / "cut"
        write_tree(root, content)
        try:
            scene.check(root, start[1])
            scene.go_on(root)
        except AssertionError as error:
            yield str(error).splitlines()[0]
        finally:
            shutil.rmtree(root)


def test_the_model_is_the_disk(disk):
    """After the last call, with everything written, the model holds what the real disk holds."""
    from checkpoint.sample import tree_bytes

    write_tree(disk.root.parent / "model", disk.moments[-1][-1])
    assert tree_bytes(disk.root.parent / "model") == tree_bytes(disk.root)


def test_after_the_last_call_nothing_is_left_to_lose(disk, start, scratch):
    """What save() returned for is on the platter; what was removed may come back once."""
    least = disk.moments[-1][0]
    write_tree(scratch / "least", least)
    assert "checkpoint-3" in least
    scene.check(scratch / "least", start[1], finished=True)


def test_whatever_the_disk_forgets_the_newest_checkpoint_is_whole(disk, start, scratch):
    assert len(outcomes(disk)) > 200
    assert list(losses(disk, start, scratch)) == []


@pytest.mark.proof
def test_whatever_the_disk_forgets_in_thousands_of_ways(start, scratch):
    disk = recorded(start, scratch / "long", samples=100)
    assert len(outcomes(disk)) > 3000
    assert list(losses(disk, start, scratch)) == []


@pytest.mark.parametrize(
    "forgotten",
    [
        pytest.param("files", marks=pytest.mark.proof),
        pytest.param("folders", marks=pytest.mark.proof),
    ],
)
def test_the_model_catches_a_save_that_does_not_flush(start, scratch, monkeypatch, forgotten):
    """The proof proves something: it finds losses as soon as one kind of flush is left out."""
    if forgotten == "files":
        flush = files.File.sync
        monkeypatch.setattr(files.File, "sync", lambda f: flush(f) if f.path.is_dir() else None)
    else:
        monkeypatch.setattr(files, "sync_folder", lambda path: None)
    disk = recorded(start, scratch / f"careless-{forgotten}", samples=1)
    monkeypatch.undo()
    assert len(list(islice(losses(disk, start, scratch), 11))) == 11, "more than ten"
