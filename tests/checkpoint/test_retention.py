"""Old checkpoints go, the newest and the protected stay, whatever happens in between."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot import files
from surefoot.checkpoint.commit import clean, committed
from surefoot.checkpoint.retention import forget
from surefoot.errors import CheckpointError

from .test_commit import names, publish


@given(
    st.sets(st.integers(0, 12), max_size=6),
    st.none() | st.integers(0, 7),
    st.sets(st.integers(0, 12), max_size=3),
)
def test_what_stays_is_the_newest_and_the_protected(tmp_path_factory, steps, keep, protected):
    root = tmp_path_factory.mktemp("run")
    folders = [publish(root, step) for step in sorted(steps)]
    dropped = forget(root, keep=keep, protected=[root / f"checkpoint-{step}" for step in protected])
    newest = folders if keep is None else folders[-max(keep, 1) :]
    stays = [f for f in folders if f in newest or int(f.name.split("-")[1]) in protected]
    assert committed(root) == stays
    assert dropped == [f for f in folders if f not in stays]
    assert names(root) == sorted(f.name for f in stays)


def test_protected_paths_may_be_written_otherwise(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        publish(tmp_path / "run", step)
    monkeypatch.chdir(tmp_path)
    assert forget(files.Path("run"), keep=1, protected=[files.Path("run/../run/checkpoint-1")]) == [
        files.Path("run/checkpoint-2")
    ]


def test_what_was_never_committed_does_not_count(tmp_path):
    publish(tmp_path, 1)
    (tmp_path / "checkpoint-2").mkdir()
    assert forget(tmp_path, keep=1) == []
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]


def test_a_removal_that_is_cut_short_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    publish(tmp_path, 1)
    publish(tmp_path, 2)

    class Failing:
        def __getattr__(self, name):
            return getattr(os, name)

        def rmdir(self, path):
            raise OSError(5, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(files, "os", Failing())
        with pytest.raises(CheckpointError, match="cannot remove an old checkpoint"):
            forget(tmp_path, keep=1)
    assert [p.name for p in committed(tmp_path)] == ["checkpoint-2"]
    assert len(clean(tmp_path)) == 1
    assert names(tmp_path) == ["checkpoint-2"]
