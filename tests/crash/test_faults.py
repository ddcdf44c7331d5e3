"""A fault of the system at every call of the seam: an error with a reason, and nothing is lost."""

import contextlib
import errno
from functools import partial

import pytest

from checkpoint.sample import blank, same_states
from each import some
from surefoot.checkpoint.loading import load
from surefoot.checkpoint.verification import find_latest, verify
from surefoot.errors import CheckpointError, explain
from surefoot.storage import files

from . import scene
from .system import System, fails, short

CODES = [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES, errno.EDQUOT]


@pytest.fixture(scope="module")
def start(scratch):
    root = scratch / "start"
    return root, scene.set_up(root)


@pytest.fixture(scope="module")
def calls(start, scratch):
    """The calls of the scene when nothing fails."""
    system = System()
    root = scene.copy_of(start[0], scratch / "count")
    with_system(system, partial(scene.act, root))
    scene.check(root, start[1], finished=True)
    return system.seen


def with_system(system, work):
    real, files.os = files.os, system
    try:
        return work()
    finally:
        files.os = real


def test_the_scene_reaches_the_disk_by_every_kind_of_call(calls):
    wanted = {"open", "close", "pwrite", "preadv", "posix_fallocate", "fsync", "mkdir", "rename"}
    assert wanted | {"link", "unlink", "rmdir", "listdir", "fstat", "stat", "lstat"} <= set(calls)


@pytest.mark.parametrize("code", some(CODES, [errno.ENOSPC, errno.EIO]), ids=errno.errorcode.get)
@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.proof)])
def test_an_error_at_any_call_loses_nothing(start, calls, scratch, code, stride):
    refused = 0
    numbers = range(code % stride, len(calls), stride)  # other calls for other errors
    for at in numbers:
        root = scene.copy_of(start[0], scratch / f"{code}-{stride}-{at}")
        try:
            with_system(System(fails(code), at), partial(scene.act, root))
        except CheckpointError as error:
            refused += 1
            assert explain(OSError(code, "")).split(";")[0].split(" (")[0] in str(error), (
                f"{calls[at]}: {error}"
            )
        scene.check(root, start[1])
        scene.go_on(root)
    assert refused > len(numbers) * 0.5  # the rest hit the look at the parent: it is written anew


class FromThenOn(System):
    """Every call of a kind fails from number ``first`` on."""

    def __init__(self, first, kinds):
        super().__init__(calls=kinds)
        self.first = first

    def __getattr__(self, name):
        call = super().__getattr__(name)
        if name not in self.calls:
            return call

        def counted(*args, **kwargs):
            if len(self.seen) >= self.first:
                return fails(errno.EROFS)(name, call, args, kwargs)
            return call(*args, **kwargs)

        return counted


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.proof)])
def test_from_some_call_on_every_change_fails(start, calls, scratch, stride):
    """A disk that fails goes on failing: also the cleaning up after the failure meets the error."""
    changing = ("write", "pwrite", "posix_fallocate", "fsync", "mkdir", "rename", "unlink", "rmdir")
    for at in range(0, sum(name in changing for name in calls), stride):
        root = scene.copy_of(start[0], scratch / f"dying-{stride}-{at}")
        with contextlib.suppress(CheckpointError):
            with_system(FromThenOn(at, changing), partial(scene.act, root))
        scene.check(root, start[1])
        scene.go_on(root)


def test_a_call_that_does_less_than_asked_is_called_again(start, calls, scratch):
    for at in range(len(calls)):
        if calls[at] in ("pwrite", "preadv"):
            root = scene.copy_of(start[0], scratch / f"short-{at}")
            with_system(System(short, at), partial(scene.act, root))
            scene.check(root, start[1], finished=True)


def test_a_load_that_meets_an_error_at_any_call_says_so(start):
    root, _ = start
    system = System()
    states = scene.states(9)
    with_system(system, partial(load, root / "checkpoint-2", states))
    for at in range(len(system.seen)):
        states = blank(scene.states(2))
        try:
            with_system(System(fails(errno.EIO), at), partial(load, root / "checkpoint-2", states))
        except CheckpointError as error:
            assert "input/output error" in str(error)
            assert all(state.loads == 0 for state in states.values())
        else:
            assert same_states(scene.states(2), states)


def test_short_reads_are_read_on(start):
    root, _ = start
    system = System()
    with_system(system, lambda: load(root / "checkpoint-2", blank(scene.states(2))))
    for at, name in enumerate(system.seen):
        if name == "preadv":
            states = blank(scene.states(2))
            with_system(System(short, at), partial(load, root / "checkpoint-2", states))
            assert same_states(scene.states(2), states)


def test_finding_and_verifying_never_raise_what_the_disk_does(start):
    root, _ = start
    system = System()
    with_system(system, lambda: find_latest(root))
    for at in range(len(system.seen)):
        try:
            found = with_system(System(fails(errno.EIO), at), lambda: find_latest(root))
        except CheckpointError as error:
            assert "input/output error" in str(error)
        else:
            assert found.path is not None
    for at in range(len(system.seen)):
        try:
            with_system(
                System(fails(errno.EACCES), at), lambda: verify(root / "checkpoint-2", full=True)
            )
        except CheckpointError as error:
            assert "no permission" in str(error)
