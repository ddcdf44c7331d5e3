"""Run by test_crew.py: several processes save together, and something happens to one of them.

    python -m crash.crew EVENT,EVENT RANKS LAYOUT STRIDE TARGET

Every rank is a process that trains, which does nothing but save step 3, and its real writer. What
happens: a writer is killed, or its disk fails, or those that train are killed, at any call by which
a writer changes something. Prints how many cases there were.
"""

import ctypes
import errno
import json
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import forks
from checkpoint.sample import blank, same_states, sample_states, tree_bytes
from surefoot.checkpoint.disk.commit import committed
from surefoot.checkpoint.loading import load
from surefoot.checkpoint.saving import _joint as joint
from surefoot.checkpoint.saving import _writer_process as writer_process
from surefoot.checkpoint.saving._writer_process import Background
from surefoot.checkpoint.saving.preparation import WriterGroup, prepare, save
from surefoot.checkpoint.verification import find_latest, recover_latest
from surefoot.errors import CheckpointError
from surefoot.storage import files

from .system import System, dies_after, dies_before, dies_within, fails

CHANGING = ("open", "write", "pwrite", "posix_fallocate", "ftruncate", "fsync")
CHANGING += ("mkdir", "rename", "link", "unlink", "rmdir")
NEW, FAILED, SECONDS = 3, 7, 60
PR_SET_CHILD_SUBREAPER = 36


class Changes(System):
    """Counts the calls that change something: how often one looks is up to chance."""

    def __init__(self, fault=None, at=None, from_then_on=False):
        super().__init__(fault, at, CHANGING)
        self.from_then_on = from_then_on

    def __getattr__(self, name):
        call = super().__getattr__(name)
        if name != "open":
            return call if name not in CHANGING or not self._is_over() else self._failing(name)
        real = getattr(os, name)

        def opened(path, flags, *rest, **options):
            if not flags & os.O_CREAT:
                return real(path, flags, *rest, **options)
            changing = self._failing(name) if self._is_over() else call
            return changing(path, flags, *rest, **options)

        return opened

    def _is_over(self):
        return self.from_then_on and len(self.seen) > self.at

    def _failing(self, name):
        return lambda *args, **options: self.fault(name, getattr(os, name), args, options)


def kill_those_that_train(name, real, args, kwargs):
    """All of them, as a launcher does after a failure, or a machine that is short of memory."""
    for path in Path(os.environ["CREW"]).glob("pid-*"):
        os.kill(int(path.read_text()), signal.SIGKILL)
    return real(*args, **kwargs)


def kill_everyone(name, real, args, kwargs):
    os.kill(0, signal.SIGKILL)


# What happens; whether step 3 must be saved all the same; whether to a second writer, too.
EVENTS = {
    "before": (dies_before, True, False),
    "within": (dies_within, True, False),
    "after": (dies_after, True, False),
    "again": (dies_after, False, True),
    "ENOSPC": (fails(errno.ENOSPC), True, False),
    "EIO": (fails(errno.EIO), True, False),
    "dying": (fails(errno.EIO), False, True),
    "orphans": (kill_those_that_train, False, False),
    "all": (kill_everyone, False, False),
}
MOMENTS = ("before", "begun", "done")  # of a process that trains


class Ranks(NamedTuple):
    ranks: int
    layout: str


def states(step):
    """A model of which a part is frozen, so that its file is shared by all checkpoints."""
    made = sample_states(step)
    made["model"].state["model.frozen.weight"] = torch.arange(200.0)
    return made


def jobs(root, step, ranks, layout):
    """Every rank's job, agreed on as processes do."""
    barrier, said, made = threading.Barrier(ranks), [None] * ranks, [None] * ranks
    held = [states(step) for _ in range(ranks)]

    def exchange(rank, value):
        said[rank] = value
        barrier.wait()
        heard = [*said]
        barrier.wait()
        return heard

    def work(rank):
        made[rank] = prepare(
            root,
            step,
            held[rank],
            companions={"config.json": b"{}"},
            parent=f"checkpoint-{step - 1}",
            max_shard_size=900,
            writers=WriterGroup(
                layout, rank, ranks, {"dp_replicate": ranks}, partial(exchange, rank)
            ),
        )

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, live = made[0]
    return [(replace(first, forget=[f"checkpoint-{step - 2}"]), live), *made[1:]]


def train(rank, job, dies_at=None):
    """Save one step, as a process that trains does: its exit code."""

    def moment(name):
        if name == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    moment("before")
    made = Background()
    try:
        made.start(*job)
        moment("begun")
        made.wait()
        moment("done")
        made.close()
    except CheckpointError as error:
        print(f"rank {rank}: {error}", file=sys.stderr)
        return FAILED
    return 0


def life(root, crew, notes, dying=(None, None)):
    """Start all, and end them together as a launcher does; the exit code of the first failure."""
    os.environ["CREW"] = str(notes)
    made = jobs(root, NEW, crew.ranks, crew.layout)
    pids = {}
    group = 0
    for rank in range(crew.ranks):
        pid = os.fork()
        if not pid:
            try:
                os.setpgid(0, group)
                os.environ["CREW_RANK"] = str(rank)
                (notes / f"pid-{rank}").write_text(str(os.getpid()))
                code = train(rank, made[rank], dying[1] if rank == dying[0] else None)
                os._exit(code)
            finally:
                os._exit(99)
        group = group or pid
        os.setpgid(pid, group)
        pids[pid] = rank
    left, first, deadline = set(pids), 0, time.monotonic() + SECONDS
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if pid else 0
        left.discard(pid)
        if pid in pids and code and not first:
            first = code
            for other in left:
                os.kill(other, signal.SIGKILL)
        assert time.monotonic() < deadline, "those that train hang"
        time.sleep(0 if pid else 0.002)
    return first


def wait_for_writers():
    deadline = time.monotonic() + SECONDS
    try:
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            assert time.monotonic() < deadline, "a writer hangs"
            time.sleep(0 if pid else 0.002)
    except ChildProcessError:
        pass


def check(root, before, must_be_saved):
    """The next start: what it goes on from is whole, and stays the newest; nothing else is left."""
    found = recover_latest(root)
    wait_for_writers()
    assert recover_latest(root) == found, "a save was committed behind the back of the next start"
    there = {int(path.name.split("-")[1]): path for path in committed(root)}
    assert found == there[max(there)], "a damaged checkpoint"
    step = max(there)
    assert step == NEW or (step == NEW - 1 and not must_be_saved), f"step {step}"
    assert NEW - 1 in there, "forgotten before the new one was there"
    for old in there.keys() & before.keys():
        assert tree_bytes(there[old]) == before[old], f"checkpoint-{old} was touched"
    loaded = blank(states(step))
    load(found, loaded)
    assert same_states(states(step), loaded)
    assert {p.name for p in root.iterdir()} == {p.name for p in there.values()}, "leftovers"


def go_on(root, crew, notes, before):
    if find_latest(root).path != root / f"checkpoint-{NEW}":
        assert life(root, crew, notes) == 0
        check(root, before, must_be_saved=True)


def writers(rank, system):
    """Let the first writer of ``rank``, or each one, meet what happens."""

    def prepare(command):
        if os.environ["CREW_RANK"] != str(rank):
            return
        notes = Path(os.environ["CREW"])
        number = len(list(notes.glob("writer-*")))
        (notes / f"writer-{number}").touch()
        if (made := system(number)) is not None:
            files.os = made

    forks.put(writer_process, prepare)


def count(start, target, crew, rank):
    """The changes that the writer of ``rank`` makes when nothing happens."""
    seen = target / "seen"

    class Noting(Changes):
        def __getattr__(self, name):
            found = super().__getattr__(name)
            seen.write_text(json.dumps(self.seen))
            return found

    writers(rank, lambda number: Noting())
    root, notes, before = stage(start, target / "count")
    assert life(root, crew, notes) == 0
    check(root, before, must_be_saved=True)
    shutil.rmtree(target / "count")
    return len(json.loads(seen.read_text()))


def stage(start, folder):
    folder.mkdir()
    (folder / "notes").mkdir()
    root = shutil.copytree(start, folder / "run")
    before = {step: tree_bytes(root / f"checkpoint-{step}") for step in (1, 2)}
    return root, folder / "notes", before


def at_calls(start, target, crew, stride, first, event):
    """One case for every ``stride``-th change of every rank's writer."""
    fault, must_be_saved, is_again = EVENTS[event]
    cases = 0
    for rank in range(crew.ranks):
        for at in range(first, count(start, target, crew, rank), stride):
            root, notes, before = stage(start, target / f"{rank}-{at}")
            made = lambda at=at: Changes(fault, at, from_then_on=event == "dying")  # noqa: E731
            writers(rank, lambda n, made=made: made() if n == 0 or is_again else None)
            try:
                code = life(root, crew, notes)
                check(root, before, must_be_saved)
                assert code == 0 or not must_be_saved, f"ended with {code}"
                writers(rank, lambda number: None)
                go_on(root, crew, notes, before)
            except AssertionError as error:
                raise AssertionError(f"{event}, rank {rank}, change {at}: {error}") from error
            shutil.rmtree(root.parent)
            cases += 1
    return cases


def at_moments(start, target, crew):
    """One case for every moment of every process that trains."""
    for rank in range(crew.ranks):
        for moment in MOMENTS:
            writers(rank, lambda number: None)
            root, notes, before = stage(start, target / f"{rank}-{moment}")
            assert life(root, crew, notes, (rank, moment)) == -signal.SIGKILL
            check(root, before, must_be_saved=moment == "done" and rank == 0)
            go_on(root, crew, notes, before)
    return crew.ranks * len(MOMENTS)


def main(what, crew, stride, target):
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans are waited for here
    joint._LAST_CHANCE, joint._PATIENCE = 0.5, 20.0
    start = target / "start"
    for step in (1, 2):
        save(start, step, states(step))
    cases = 0
    for index, event in enumerate(what):
        folder = target / event
        folder.mkdir()
        if event == "moments":
            cases += at_moments(start, folder, crew)
        else:
            cases += at_calls(start, folder, crew, stride, 5 * index % stride, event)
    print(cases)


if __name__ == "__main__":
    crew = Ranks(int(sys.argv[2]), sys.argv[3])
    main(sys.argv[1].split(","), crew, int(sys.argv[4]), Path(sys.argv[5]))
