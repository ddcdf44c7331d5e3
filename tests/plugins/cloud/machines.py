"""Machines without a common disk: groups of processes, each with its own HOME, cache and working
folder, that only a store and a port connect."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import warm
from project import losses

SECONDS = 300  # that a launch may take


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def clock(place, late):
    """Variables by which processes of Python see another time. What has imported is too old for
    them."""
    folder = place / "clock"
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(
        f"import time\nreal = time.time\ntime.time = lambda: real() - {late}\n"
    )
    return {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}


class Launch:
    """One launch of a recipe on machines with so many ranks each. ``late`` is by how many seconds
    the clock of the last machine is wrong."""

    def __init__(self, project, url, places, ranks, *overrides, is_cyclic=False, late=0):
        self.machines, self.places = [], [Path(place) for place in places]
        size, port, first = sum(ranks), free_port(), 0
        for machine, (place, count) in enumerate(zip(self.places, ranks, strict=True)):
            self.machines.append([])
            for local in range(count):
                self.machines[-1].append(
                    self._start(project, url, place, overrides, {
                        "RANK": machine + len(ranks) * local if is_cyclic else first + local,
                        "LOCAL_RANK": local,
                        "WORLD_SIZE": size,
                        "LOCAL_WORLD_SIZE": count,
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": port,
                        **(clock(place, late) if late and machine == len(ranks) - 1 else {}),
                    })
                )  # fmt: skip
            first += count

    def _start(self, project, url, place, overrides, variables):
        home, work = place / "home", place / "work"
        for folder in (home, work, place / "tmp"):
            folder.mkdir(parents=True, exist_ok=True)
        settings = {
            **os.environ,
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / ".cache"),
            "TMPDIR": str(place / "tmp"),
            "OMP_NUM_THREADS": "1",
            **{name: str(value) for name, value in variables.items()},
        }
        command = [sys.executable, "-m", "surefoot", "train", str(project.recipe)]
        command += [f"train.output_dir={url}", *overrides]
        log = (place / f"rank_{variables['RANK']}.log").open("ab")
        start = subprocess if "PYTHONPATH" in variables else warm
        with log:
            return start.Popen(
                command, cwd=work, env=settings, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def ranks(self):
        return [process for machine in self.machines for process in machine]

    def wait(self):
        """The exit codes."""
        deadline = time.monotonic() + SECONDS
        for process in self.ranks:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"still running\n{self.logs()}") from None
        return [process.returncode for process in self.ranks]

    def kill(self, machine=None, number=signal.SIGKILL):
        """Every process of a machine, or of all: also those that write and upload."""
        chosen = self.machines if machine is None else [self.machines[machine]]
        for process in (process for each in chosen for process in each):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                continue

    def logs(self):
        paths = sorted({path for place in self.places for path in place.glob("rank_*.log")})
        return "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in paths)

    def folder(self, machine=0, cache="home/.cache/surefoot/runs"):
        (found,) = (self.places[machine] / cache).glob("*")
        return found

    def losses(self, **place):
        return losses(self.folder(**place))
