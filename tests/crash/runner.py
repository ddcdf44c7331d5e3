"""Run by test_kills.py: start a run, kill it at a random moment, start it again, and so on.

The run is a trainer that does nothing but save. It tells each step once it is saved; a step that
was told must be there at the next start.
"""

import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from checkpoint.sample import blank, same_states, sample_states
from surefoot.checkpoint.disk.commit import being_written, clean, committed
from surefoot.checkpoint.disk.retention import drop_all
from surefoot.checkpoint.loading import load
from surefoot.checkpoint.saving._writer_process import Background
from surefoot.checkpoint.saving.preparation import prepare, save
from surefoot.checkpoint.verification import find_latest


def start(root):
    """Go on from the newest checkpoint: its step."""
    clean(root)
    found = find_latest(root)
    assert not found.passed_over, found.passed_over
    step = 0
    if found.path is not None:
        step = int(found.path.name.split("-")[1])
        states = blank(sample_states(step))
        load(found.path, states)
        assert same_states(sample_states(step), states)
    return step


def train(root, told):
    """Go on, and save until killed."""
    step = start(root)
    while True:
        os.write(told, b"%d\n" % step)
        step += 1
        save(root, step, sample_states(step), max_shard_size=700)
        drop_all(committed(root)[:-2])


def train_in_the_background(root, told):
    """The same with saves in a process of their own, which may outlive the one that trains."""
    while being_written(root):
        time.sleep(0.01)
    step = start(root)
    background = Background()
    while True:
        os.write(told, b"%d\n" % step)
        step += 1
        parent = f"checkpoint-{step - 1}"
        job, live = prepare(root, step, sample_states(step), parent=parent)
        background.start(replace(job, forget=[f"checkpoint-{step - 2}"]), live)
        background.wait()


def life(root, seconds, train, everybody):
    """One start and its end: the step it went on from, and the last one it told of."""
    listen, told = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setpgid(0, 0)
            train(root, told)
        finally:
            os._exit(1)
    os.close(told)
    with os.fdopen(listen, "rb") as pipe:
        first = pipe.readline()  # killed no earlier than this, so that every start gets somewhere
        time.sleep(seconds)
        (os.killpg if everybody else os.kill)(child, signal.SIGKILL)
        rest = [line for line in pipe.read().split(b"\n") if line]
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, f"it ended by itself: {status}"
    return int(first), int((rest or [first])[-1])


def main(root, kills, how):
    rng = random.Random(0)
    newest, train_so, longest = 0, TRAINERS[how], 0.1 if how == "direct" else 0.3
    for _ in range(kills):
        seconds = rng.uniform(0, longest)
        first, last = life(root, seconds, train_so, everybody=rng.random() < 0.5)
        assert first >= newest, f"step {newest} was saved, but the next start went on from {first}"
        newest = last
        if not newest:
            longest *= 1.5  # too short a life for a machine as busy as this one
    print(newest)


TRAINERS = {"direct": train, "background": train_in_the_background}

if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
