"""Run by test_gang.py: a run of several processes, of which one is killed again and again.

    python gang.py KILLS SEED COUNTS FOLDER

Real ``surefoot train``, its launcher, its ranks and their writers, but forked, so that a start
costs a second. Killed is the launcher, its fork server, a rank or a writer, at any moment; the same
command goes on, with as many processes as before or, if COUNTS names several numbers, with any of
them. Every time the run comes to its end, it is compared with one that was never killed.
"""

import contextlib
import ctypes
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import forks
from project import Project, checkpoints, losses
from surefoot.checkpoint.layouts.opening import open_folder
from surefoot.checkpoint.saving import _writer_process as writer_process
from surefoot.checkpoint.sources import read_whole
from surefoot.checkpoint.verification import verify
from surefoot.cli import train as imported_early  # noqa: F401
from surefoot.parallel import fork_server
from surefoot.parallel import launcher as launch

ERROR = 2  # the code of a run that ends with an error of its own
STEPS, SECONDS = 30, 120
PR_SET_CHILD_SUBREAPER = 36
RECIPE = {
    "optim": {"adamw": {"learning_rate": 0.001}},
    "train": {"max_steps": STEPS, "micro_batch_size": 1},  # for up to four ranks
    "checkpoint": {"save_steps": 3},
}


def begin(project, count, log):
    parallel = f"parallel.num_processes={count}"
    command = [sys.executable, "-m", "surefoot", "train", str(project.recipe), parallel]
    return forks.Popen(command, stdout=log, stderr=log)


def children(pid):
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def ranks_of(launcher):
    """The forks of its fork server."""
    return [pid for server in children(launcher) for pid in children(server)]


def is_watchdog(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return "_watchdog" in Path(f"/proc/{pid}/cmdline").read_text()
    return False


def num_logged(project):
    path = project.run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def choose(launcher, count, rng):
    """Whom to kill: its kind and its number."""
    servers = children(launcher) if count > 1 else []
    ranks = ranks_of(launcher) if count > 1 else [launcher]
    writers = [pid for rank in ranks for pid in children(rank) if not is_watchdog(pid)]
    kinds = {"writer": writers, "rank": ranks, "launcher": [launcher] if count > 1 else []}
    kinds["server"] = servers
    kind = rng.choice([kind for kind, pids in kinds.items() if pids] or ["launcher"])
    return kind, rng.choice(kinds[kind] or [launcher])


def reached(project, rng):
    """A moment: some new steps on, or in the middle of a save, and a little later; or any."""
    lines, is_any = num_logged(project) + rng.randint(1, 5), rng.random() < 0.1
    in_a_save, began = rng.random() < 0.6, time.monotonic()

    def is_now():
        saving = in_a_save and any(project.run.glob(".checkpoint-*.part"))
        early = is_any and time.monotonic() - began > 0.5
        if not (saving or early or num_logged(project) >= lines):
            return False
        time.sleep(rng.uniform(0, 0.05))
        return True

    return is_now


def life(project, count, rng, kills, wanted):
    """One start and its end: whether the run is complete."""
    path = project.folder / "log.txt"
    with path.open("w") as log:
        process = begin(project, count, log)
    ranks, deadline, num_writers = [], time.monotonic() + SECONDS, 0
    is_now, expected = reached(project, rng), 0
    while (code := process.poll()) is None:
        ranks = [*children(process.pid), *ranks_of(process.pid)] or ranks
        if kills.total() < wanted and not expected and is_now():
            kind, pid = choose(process.pid, count, rng)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                kills[kind] += 1
                if kind == "writer":
                    num_writers += 1
                    is_now = reached(project, rng)  # which the run survives
                else:
                    is_alone = kind == "launcher" or count == 1
                    expected = -signal.SIGKILL if is_alone else 128 + signal.SIGKILL
        assert time.monotonic() < deadline, f"it hangs: {path.read_text()[-3000:]}"
        time.sleep(0.002)
    told = path.read_text()
    # two in one save, which is tried again once, end the run with an error
    is_given_up = code == ERROR and num_writers > 1 and "cannot save" in told
    assert code in (0, expected) or is_given_up, f"{code}, not {expected}: {told[-3000:]}"
    while any(map(is_there, ranks)):
        reap()
        assert time.monotonic() < deadline, "a rank hangs"
        time.sleep(0.005)
    return code == 0


def reap():
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def weights(folder):
    assert verify(folder, full=True).ok
    source = open_folder(folder)
    return {name: read_whole(source, name) for name in source.shapes()}


def whole(folder, count):
    project = Project(folder, **RECIPE)
    assert life(project, count, random.Random(0), Counter(), 0)
    return project


def compare(project, reference, is_bitwise):
    """The largest difference between losses, and between weights."""
    ours, theirs = losses(project.run), losses(reference.run)
    assert ours.keys() == theirs.keys() == set(range(1, STEPS + 1))
    mine, other = (weights(checkpoints(p.run)[-1]) for p in (project, reference))
    assert mine.keys() == other.keys()
    loss = max(abs(ours[step] - theirs[step]) for step in theirs)
    weight = max(float((mine[name] - other[name]).abs().max()) for name in other)
    assert not list(project.run.glob(".checkpoint*")), "leftovers"
    assert not is_bitwise or (loss, weight) == (0, 0), f"losses {loss}, weights {weight}"
    return loss, weight


def main(wanted, seed, counts, folder):
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    forks.put(launch)
    forks.put(fork_server)
    forks.put(writer_process)
    rng, kills, starts, rounds, worst = random.Random(seed), Counter(), 0, 0, (0.0, 0.0)
    reference = whole(folder / "reference", counts[0])
    while kills.total() < wanted:
        project = Project(folder / f"round-{rounds}", **RECIPE)
        rounds += 1
        is_done = False
        while not is_done:
            starts += 1
            is_done = life(project, rng.choice(counts), rng, kills, wanted)
        found = compare(project, reference, is_bitwise=len(counts) == 1)
        worst = tuple(map(max, worst, found))
        reap()
        told = {"kills": kills, "starts": starts, "runs": rounds, "worst": worst}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        [int(word) for word in sys.argv[3].split(",")],
        Path(sys.argv[4]),
    )
