"""Run by test_crew.py: several processes save together, and something happens to one of them.

    python -m crash.crew EVENT,EVENT RANKS STRIDE TARGET

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
import time
from dataclasses import replace
from pathlib import Path

import torch

from checkpoint.sample import blank, same_states, sample_states, tree_bytes
from surefoot import files
from surefoot.checkpoint import background, together
from surefoot.checkpoint.background import Background
from surefoot.checkpoint.box import Box
from surefoot.checkpoint.bytes import describe
from surefoot.checkpoint.commit import committed
from surefoot.checkpoint.job import Shard
from surefoot.checkpoint.load import load
from surefoot.checkpoint.plan import plan_save
from surefoot.checkpoint.resume import newest
from surefoot.checkpoint.save import RANK_FOLDER, Crew, Live, prepare, save
from surefoot.checkpoint.verify import find
from surefoot.cuts import chunk
from surefoot.errors import CheckpointError

from . import forks
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


def states(step):
    """A model of which a part is frozen, so that its file is shared by all checkpoints."""
    made = sample_states(step)
    made["model"].state["model.frozen.weight"] = torch.arange(200.0)
    return made


def part(root, step, rank, ranks, nonce):
    """Rank ``rank``'s job: every tensor is cut along its first dimension."""
    job, live = prepare(
        root,
        step,
        states(step),
        kind="full",
        companions={"config.json": b"{}"},
        parent=f"checkpoint-{step - 1}",
        crew=Crew("distributed", 0, ranks, {"dp_shard": ranks}, nonce),
    )
    shards, values = [], {}
    for role, tensors in live.groups.items():
        mine, boxes = {}, {}
        for name, tensor in tensors.items():
            first, length = chunk(len(tensor), ranks, rank) if tensor.ndim else (0, rank == 0)
            if length:
                cut = slice(first, first + length)
                mine[name] = tensor[cut].contiguous() if tensor.ndim else tensor
                start = (first, *(0,) * (tensor.ndim - 1))[: tensor.ndim]
                boxes[name] = tuple(tensor.shape), Box(start, tuple(mine[name].shape))
        described = {name: describe(name, tensor) for name, tensor in mine.items()}
        stem = f"{RANK_FOLDER.format(rank)}/{role}"
        if mine:
            plans = plan_save(stem, described, 900, boxes=boxes)
            shards += [Shard(role, plan) for plan in plans]
        values[role] = mine
    forget = [f"checkpoint-{step - 2}"] if rank == 0 else []
    small = job.small if rank == 0 else {}
    return replace(job, shards=shards, small=small, rank=rank, forget=forget), Live(values)


def train(root, rank, ranks, nonce, dies_at=None):
    """Save one step, as a process that trains does: its exit code."""

    def moment(name):
        if name == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    moment("before")
    made = Background()
    try:
        made.start(*part(root, NEW, rank, ranks, nonce))
        moment("begun")
        made.wait()
        moment("done")
        made.close()
    except CheckpointError as error:
        print(f"rank {rank}: {error}", file=sys.stderr)
        return FAILED
    return 0


def life(root, ranks, nonce, notes, dying=(None, None)):
    """Start all, and end them together as a launcher does; the exit code of the first failure."""
    os.environ["CREW"] = str(notes)
    pids = {}
    group = 0
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            try:
                os.setpgid(0, group)
                os.environ["CREW_RANK"] = str(rank)
                (notes / f"pid-{rank}").write_text(str(os.getpid()))
                code = train(root, rank, ranks, nonce, dying[1] if rank == dying[0] else None)
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
    found = newest(root)
    wait_for_writers()
    assert newest(root) == found, "a save was committed behind the back of the next start"
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


def go_on(root, ranks, notes, before):
    if find(root).path != root / f"checkpoint-{NEW}":
        assert life(root, ranks, "c0ffee", notes) == 0
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

    forks.put(background, prepare)


def count(start, target, ranks, rank):
    """The changes that the writer of ``rank`` makes when nothing happens."""
    seen = target / "seen"

    class Noting(Changes):
        def __getattr__(self, name):
            found = super().__getattr__(name)
            seen.write_text(json.dumps(self.seen))
            return found

    writers(rank, lambda number: Noting())
    root, notes, before = stage(start, target / "count")
    assert life(root, ranks, "abcdef", notes) == 0
    check(root, before, must_be_saved=True)
    shutil.rmtree(target / "count")
    return len(json.loads(seen.read_text()))


def stage(start, folder):
    folder.mkdir()
    (folder / "notes").mkdir()
    root = shutil.copytree(start, folder / "run")
    before = {step: tree_bytes(root / f"checkpoint-{step}") for step in (1, 2)}
    return root, folder / "notes", before


def at_calls(start, target, ranks, stride, first, event):
    """One case for every ``stride``-th change of every rank's writer."""
    fault, must_be_saved, is_again = EVENTS[event]
    cases = 0
    for rank in range(ranks):
        for at in range(first, count(start, target, ranks, rank), stride):
            root, notes, before = stage(start, target / f"{rank}-{at}")
            made = lambda at=at: Changes(fault, at, from_then_on=event == "dying")  # noqa: E731
            writers(rank, lambda n, made=made: made() if n == 0 or is_again else None)
            try:
                code = life(root, ranks, "abcdef", notes)
                check(root, before, must_be_saved)
                assert code == 0 or not must_be_saved, f"ended with {code}"
                writers(rank, lambda number: None)
                go_on(root, ranks, notes, before)
            except AssertionError as error:
                raise AssertionError(f"{event}, rank {rank}, change {at}: {error}") from error
            shutil.rmtree(root.parent)
            cases += 1
    return cases


def at_moments(start, target, ranks):
    """One case for every moment of every process that trains."""
    for rank in range(ranks):
        for moment in MOMENTS:
            writers(rank, lambda number: None)
            root, notes, before = stage(start, target / f"{rank}-{moment}")
            assert life(root, ranks, "abcdef", notes, (rank, moment)) == -signal.SIGKILL
            check(root, before, must_be_saved=moment == "done" and rank == 0)
            go_on(root, ranks, notes, before)
    return ranks * len(MOMENTS)


def main(what, ranks, stride, target):
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans are waited for here
    together._LAST_CHANCE, together._PATIENCE = 0.5, 20.0
    start = target / "start"
    for step in (1, 2):
        save(start, step, states(step), kind="full")
    cases = 0
    for index, event in enumerate(what):
        folder = target / event
        folder.mkdir()
        if event == "moments":
            cases += at_moments(start, folder, ranks)
        else:
            cases += at_calls(start, folder, ranks, stride, 5 * index % stride, event)
    print(cases)


if __name__ == "__main__":
    main(sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
