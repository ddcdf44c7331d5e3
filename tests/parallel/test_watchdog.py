"""A rank that makes no progress is named, with what it does, and ends the run; no other rank is."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import ranks
from surefoot.errors import HUNG
from surefoot.parallel import _watchdog
from surefoot.parallel._watchdog import (
    CALLBACKS,
    EVALUATING,
    LEAST,
    PHASES,
    REPORT,
    SAVING,
    SIZE,
    STARTING,
    TRAINING,
    UPLOADING,
    Peer,
    View,
    Watch,
    blamed,
    limit_of,
    message_of,
)
from surefoot.parallel.progress import DATA, Progress, wait_for_ranks
from surefoot.parallel.section import ParallelSection
from surefoot.parallel.watchdog import watched
from surefoot.parallel.world import ALONE

SOON = ParallelSection(timeout=0.02)  # 1.2 seconds


def report(folder):
    return json.loads((folder / REPORT).read_text())


def forked(work):
    """The exit code of a process that calls ``work()``."""
    pid = os.fork()
    if not pid:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def hung(folder, work):
    """The report on two ranks, of which ``work(world)`` hangs."""

    def watched_work(world):
        with watched(world, SOON, folder) as watched_world:
            watched_world.progress.enter(TRAINING)
            watched_world.progress.step(7)
            watched_world.progress.micro_batch(1, f"row {world.rank} of dataset 1", 100)
            work(watched_world)

    with pytest.raises(AssertionError):
        ranks.run(2, watched_work)
    return report(folder)


def test_one_process_that_holds_the_interpreter_forever_is_named_with_its_stack(tmp_path):
    def work():
        with watched(ALONE, SOON, tmp_path) as world:
            world.progress.enter(TRAINING)
            pow(7, 10**9)  # hours, in which no other thread of Python runs

    assert forked(work) == HUNG
    assert (told := report(tmp_path))["rank"] == 0
    assert told["message"].startswith("hang: the run on ")
    assert "while training, step 0: it is at " in told["message"]
    assert f"{Path(__file__).name}:" in told["message"]
    assert "in work" in told["ranks"][0]["stack"]


def test_the_rank_that_others_wait_for_is_named_with_its_rows(tmp_path):
    def work(world):
        if world.rank:
            time.sleep(60)
        world.wait()

    told = hung(tmp_path, work)
    assert (told["rank"], told["waiting"]) == (1, [0])
    assert "rank 1 of 2 on " in told["message"]
    assert "step 7, micro-batch 2: it is at" in told["message"]
    assert "rows: row 1 of dataset 1\n  waiting for it: rank 0" in told["message"]
    assert [view["state"] for view in told["ranks"]] == ["waiting", "running"]
    assert "barrier" in told["ranks"][0]["place"]


def test_of_a_rank_that_is_stopped_the_system_tells(tmp_path):
    def work(world):
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        world.wait()

    told = hung(tmp_path, work)
    assert (told["rank"], told["waiting"]) == (0, [1])
    assert "it is stopped (SIGSTOP or job control)" in told["message"]
    assert told["ranks"][0]["stack"] == ""


def test_a_rank_that_works_for_all_is_named_and_not_one_of_those_that_wait(tmp_path):
    """Its work is called by what the others wait in."""
    told = hung(tmp_path, lambda world: world.on_main(lambda: time.sleep(60)))
    assert (told["rank"], told["waiting"]) == (0, [1])
    assert "it is at" in told["message"]


def test_a_wait_that_no_frame_of_torch_shows_is_known_by_its_mark(tmp_path):
    """As for a device: a call of C, from anywhere."""

    def work(world):
        if world.rank:
            time.sleep(60)
        wait_for_ranks(time.sleep, 60)

    told = hung(tmp_path, work)
    assert (told["rank"], told["waiting"]) == (1, [0])
    waiting = told["ranks"][0]
    assert f"{Path(__file__).name}:" in waiting["place"] and "in work" in waiting["place"]
    assert waiting["collective"].startswith(f"{__file__} work < ")
    assert wait_for_ranks.__name__ == _watchdog.MARK


@pytest.mark.proof
def test_ranks_that_wait_in_different_collectives_are_shown_both(tmp_path):
    def work(world):
        if world.rank:
            dist.barrier()  # of another group than the next one
        world.wait()

    told = hung(tmp_path, work)
    assert told["guilty"] == [0, 1]
    assert "code that only some ranks run has called one" in told["message"]


def test_a_run_that_makes_progress_is_left_alone_and_leaves_nothing(tmp_path):
    def work(world):
        with watched(world, SOON, tmp_path) as watched_world:
            for _ in range(20):
                watched_world.progress.tick()
                world.wait()
                time.sleep(0.1)
            with watched_world.progress.during(UPLOADING):  # which the setting does not limit
                time.sleep(1.5)
        return signal.getsignal(HUNG), threading.active_count()

    assert ranks.run(2, work) == [(signal.SIG_DFL, 1)] * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("minutes", "is_warned"), [(0.1, True), (15, False), ("auto", False)])
def test_a_limit_below_what_a_slow_save_may_take_is_said_at_the_start(
    tmp_path, caplog, minutes, is_warned
):
    with watched(ALONE, ParallelSection(timeout=minutes), tmp_path):
        assert ("parallel.timeout: 0.1 minutes also limit" in caplog.text) == is_warned


def test_bytes_that_are_written_are_progress_of_a_save(tmp_path):
    def work():
        file = (tmp_path / "file").open("wb", buffering=0)
        with watched(ALONE, SOON, tmp_path) as world, world.progress.during(SAVING), file:
            for _ in range(30):
                file.write(bytes(1 << 20))
                time.sleep(0.1)

    assert forked(work) == 0


def test_a_suspended_run_is_not_ended(tmp_path):
    def work():
        with watched(ALONE, SOON, tmp_path) as world:
            world.progress.enter(TRAINING)
            parent = os.getpid()
            if not os.fork():
                time.sleep(2.5)
                os.kill(parent, signal.SIGCONT)
                os._exit(0)
            os.kill(parent, signal.SIGSTOP)

    assert forked(work) == 0


def view(rank, state, *, idle=100.0, limit=50.0, **fields):
    fields = {"working": idle, "phase": PHASES[TRAINING], **fields}
    return View(rank, "node", rank + 1, idle=idle, limit=limit, state=state, **fields)


ORDER = {"pid": 1, "thread": 1, "ident": "", "exit": 1, "minutes": None, "rank": 0, "size": 1}


@pytest.mark.parametrize("order", [{}, {**ORDER, "memory": "/proc/self/fd/99"}])
def test_of_a_rank_that_ends_while_its_watchdog_begins_nothing_is_said(order):
    line = json.dumps(order) + "\n" if order else ""
    begun = subprocess.run(
        [sys.executable, _watchdog.__file__],
        input=line,
        text=True,
        capture_output=True,
        check=False,
    )
    assert (begun.returncode, begun.stderr) == (0, "")


@pytest.mark.parametrize(
    ("views", "guilty"),
    [
        ([view(0, "running")], [0]),
        ([view(0, "running", idle=40)], []),
        ([view(0, "debugged")], []),
        ([view(0, "waiting"), view(1, "running")], [1]),
        # One saves for all, for longer than a step takes: the others wait for it, and may.
        ([view(0, "running", limit=900), view(1, "waiting", working=0)], []),
        # It is over, and the one that waited has just begun to work again.
        ([view(0, "waiting", working=0, limit=900), view(1, "running", working=3)], []),
        ([view(0, "waiting"), view(1, "stopped", idle=60, limit=900)], [1]),
        ([view(0, "stopped"), view(1, "stopped")], []),
        ([view(0, "waiting"), view(1, "silent")], [1]),
        ([view(0, "waiting"), view(1, "ended")], [1]),
        ([view(0, "running", idle=3), view(1, "ended")], []),
        ([view(0, "blocked"), view(1, "waiting")], [0]),
        ([view(n, "waiting", collective="ab"[n == 2]) for n in range(4)], [2]),
        ([view(n, "waiting", collective="a", step=9 - (n == 1)) for n in range(4)], [1]),
        ([view(n, "waiting", collective="a") for n in range(3)], [0, 1, 2]),
    ],
)
def test_who_is_to_blame(views, guilty):
    assert [each.rank for each in blamed(views)] == guilty


def test_limits_grow_with_the_slowest_step_and_have_a_least_one_for_each_kind():
    assert limit_of(TRAINING, 1.0, None) == 120
    assert limit_of(TRAINING, 100.0, None) == 1000
    assert limit_of(TRAINING, 0.0, None) == 1800  # the first one
    assert limit_of(TRAINING, 1.0, None, 1800.0) == 1800
    assert [limit_of(phase, 1.0, None) for phase in range(len(PHASES))] == list(LEAST)
    assert [limit_of(phase, 900.0, 0.5) for phase in range(len(PHASES))] == [*[30.0] * 7, 6 * 3600]


class Watching:
    """A watch of this process, whose clock is turned by hand."""

    def __init__(self, minutes=None):
        memory = os.memfd_create("test")
        os.ftruncate(memory, SIZE)
        self.progress = Progress(memory)
        order = {"pid": os.getpid(), "thread": threading.get_native_id(), "ident": "", "exit": 0}
        order |= {"memory": f"/proc/self/fd/{memory}", "minutes": minutes, "rank": 0}
        self.watch = Watch(order)
        os.close(memory)

    def late_after(self, phase, seconds):
        """Whether the rank is late at any time of a phase that takes so long."""
        self.progress.enter(phase)
        self.watch.look(1.0)
        is_late = False
        for _ in range(50):
            self.watch.look(seconds / 50)
            is_late |= self.watch.view.is_late
        self.progress._since -= seconds  # as long as it seems
        return is_late

    def step(self, tokens):
        """Whether the rank is late in a step of so many tokens, at 0.1 s each."""
        self.progress.enter(TRAINING)
        self.progress.micro_batch(0, "", tokens)
        self.watch.look(0.0)
        for _ in range(50):
            self.watch.look(tokens / 500)
        self.progress._since -= tokens / 10
        self.progress._began -= tokens / 10
        return self.watch.view.is_late


def test_no_alarm_in_a_run_whose_steps_vary_a_hundredfold_while_it_saves_and_evaluates():
    watching = Watching()
    lengths = [50, 5000, 50, 50, 5000, 50]  # from 5 to 500 seconds
    assert not watching.late_after(STARTING, 1500)
    for tokens in lengths:
        assert not watching.late_after(DATA, 1)
        assert not watching.step(tokens)
        assert not watching.late_after(CALLBACKS, 600)
        assert not watching.late_after(EVALUATING, 500)
        assert not watching.late_after(SAVING, 1000)
    assert watching.late_after(DATA, 130)


def test_the_first_of_a_kind_and_what_may_compile_may_take_long():
    watching = Watching()
    assert not watching.late_after(TRAINING, 1700)
    assert watching.late_after(DATA, 1900)
    watching = Watching()
    watching.progress.allow_long(DATA)
    for _ in range(3):
        assert not watching.late_after(TRAINING, 1)
        assert not watching.late_after(DATA, 1)
    assert watching.late_after(TRAINING, 130)
    assert not watching.late_after(DATA, 1700)


def test_what_is_said_of_a_rank_whose_machine_is_gone():
    gone = View(3, "node7", state="silent", unheard=130.0)
    text = message_of([gone], [0, 1, 2], 4, Path("run/hang.json"))
    assert text.startswith("hang: rank 3 of 4 on node7 has made no progress for 130 s")
    assert "its machine is off, or cannot be reached" in text
    assert "waiting for it: rank 0, 1, 2" in text


def test_each_second_is_in_one_part(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress()

    def pass_(seconds):
        now[0] += seconds

    pass_(2)
    progress.enter(TRAINING)
    pass_(3)
    with progress.during(EVALUATING):
        pass_(4)
        with progress.during(SAVING):
            pass_(5)
        pass_(6)
    with pytest.raises(KeyError), progress.during(DATA):
        pass_(7)
        raise KeyError
    progress.prepared(6)
    progress.enter(UPLOADING)
    pass_(8)
    expected = {"starting": 2, "training": 9, "evaluating": 10, "saving": 5, "data": 1}
    assert progress.seconds == expected | {"ending": 8}
    assert sum(progress.seconds.values()) == now[0]


@pytest.mark.parametrize("garbage", [b"[1]\n", b"x\n", b"[" * 100_000 + b"\n", b"y" * (1 << 21)])
def test_what_is_no_message_closes_the_connection(garbage):
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    peer, messages = Peer(ours), []
    while peer.is_open:
        garbage = garbage[theirs.send(garbage) :]
        messages += peer.receive()
    theirs.close()
    ours.close()
    assert messages == []
