"""Run by test_kills.py: start a run, kill it at a random moment, start it again, and so on.

The run is a trainer that does nothing but save. It tells each step once it is saved; a step that
was told must be there at the next start.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from checkpoint.sample import blank, same_states, sample_states
from surefoot.checkpoint.commit import clean
from surefoot.checkpoint.load import load
from surefoot.checkpoint.retention import forget
from surefoot.checkpoint.save import save
from surefoot.checkpoint.verify import find


def train(root, told):
    """Go on from the newest checkpoint, and save until killed."""
    clean(root)
    found = find(root)
    assert not found.passed_over, found.passed_over
    step = 0
    if found.path is not None:
        step = int(found.path.name.split("-")[1])
        states = blank(sample_states(step))
        load(found.path, states)
        assert same_states(sample_states(step), states)
    while True:
        os.write(told, b"%d\n" % step)
        step += 1
        save(root, step, sample_states(step), kind="full", max_shard_size=700)
        forget(root, keep=2)


def life(root, seconds):
    """One start and its end: the step it went on from, and the last one it told of."""
    listen, told = os.pipe()
    if (child := os.fork()) == 0:
        try:
            train(root, told)
        finally:
            os._exit(1)
    os.close(told)
    with os.fdopen(listen, "rb") as pipe:
        first = pipe.readline()  # killed no earlier than this, so that every start gets somewhere
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        rest = [line for line in pipe.read().split(b"\n") if line]
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, f"it ended by itself: {status}"
    return int(first), int((rest or [first])[-1])


def main(root, kills):
    rng = random.Random(0)
    newest = 0
    for _ in range(kills):
        first, last = life(root, rng.uniform(0, 0.1))
        assert first >= newest, f"step {newest} was saved, but the next start went on from {first}"
        newest = last
    print(newest)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
