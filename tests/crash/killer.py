"""Run by test_kills.py in a process of its own: fork, kill the child at a call, leave what is left.

A process of one thread forks safely; the tests' own process is not one.
"""

import os
import sys
from pathlib import Path

from surefoot.storage import files

from . import scene
from .system import DEAD, System, dies_after, dies_before, dies_within

FAULTS = {"before": dies_before, "within": dies_within, "after": dies_after}


def main(start, target, step):
    root = scene.copy_of(start, target / "count")
    files.os = system = System()
    scene.act(root)
    files.os = os
    for at in range(0, len(system.seen), step):
        for name, fault in FAULTS.items():
            victim = scene.copy_of(start, target / f"{at}-{name}")
            if (child := os.fork()) == 0:
                files.os = System(fault, at)
                scene.act(victim)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == DEAD, (at, name, status)
    print(len(system.seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
