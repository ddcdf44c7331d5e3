"""Wall and CPU seconds of commands, several times over, and tables of them.

The machine may be shared and noisy: wall seconds then say little and CPU seconds (user and system,
children included) more. Both are given, as the median and the whole range. Subjects take turns in
one run, so that what slows one slows the other too.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

import psutil

from surefoot.cli.env import processor

BUSY_SECONDS = 1.0  # over which the use of cores by others is measured
QUIET = 0.2  # cores that others may use
POLL_SECONDS = 0.01
TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class Sample:
    """What one run of something cost, in seconds."""

    wall: float
    cpu: float


def timed(
    command: Sequence[str | Path], env: Mapping[str, str], log: Path, *, exit_code: int = 0
) -> Sample:
    """Run a command to its end; its output goes to ``log``."""
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    wall = time.monotonic() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != exit_code:
        raise failure(command, process.returncode, log)
    return Sample(wall, usage.ru_utime + usage.ru_stime)


def timed_until_line(
    command: Sequence[str | Path], env: Mapping[str, str], log: Path, file: Path
) -> Sample:
    """What a command has cost when ``file`` has its first whole line; then it may end."""
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            while not _has_line(file):
                if process.poll() is not None or time.monotonic() - start > TIMEOUT_SECONDS:
                    raise failure(command, process.returncode, log)
                time.sleep(POLL_SECONDS)
            sample = Sample(time.monotonic() - start, _cpu(process.pid))
            if process.wait(TIMEOUT_SECONDS):
                raise failure(command, process.returncode, log)
        finally:
            process.kill()
            process.wait()
    return sample


def failure(command: Sequence[str | Path], code: int | None, log: Path) -> SystemExit:
    """The end of a benchmark whose subject does not run."""
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    return SystemExit(f"{' '.join(map(str, command))}: exit code {code}\n{tail}")


def _has_line(file: Path) -> bool:
    return file.exists() and b"\n" in file.read_bytes()


def _cpu(pid: int) -> float:
    """CPU seconds of a running process and its children, the ended ones among them."""
    times = psutil.Process(pid).cpu_times()
    total = times.user + times.system + times.children_user + times.children_system
    children = psutil.Process(pid).children(recursive=True)
    return total + sum(sum(child.cpu_times()[:2]) for child in children)


def interleaved(subjects: Sequence[str], repetitions: int) -> list[str]:
    """Whose turn it is: all of them again and again, every other round backwards."""
    rounds = [subjects if i % 2 == 0 else subjects[::-1] for i in range(repetitions)]
    return [subject for each in rounds for subject in each]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """``median (smallest - largest)``."""
    low, high = min(values), max(values)
    return f"{median(values):,.{digits}f} ({low:,.{digits}f} - {high:,.{digits}f})"


def rate(count: int, seconds: Sequence[float]) -> str:
    """So many a second, in thousands: ``median (smallest - largest)``."""
    return spread([count / s / 1000 for s in seconds], 0)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """How many times ours theirs is, by the medians: above 1, ours is less."""
    return f"{median(theirs) / median(ours):.3g}x"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def versions(*names: str) -> str:
    """Versions of packages in this environment."""
    return ", ".join(f"{name} {version(name)}" for name in names)


def machine() -> str:
    """One line on where and when this ran, and how busy other programs keep the machine now; a
    warning where they do. A thread that made merges 1.3 times as fast was once taken out because
    of figures at a load of 6 to 14."""
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    memory = psutil.virtual_memory().total / 2**30
    busy = psutil.cpu_percent(BUSY_SECONDS) / 100 * psutil.cpu_count()  # while this sleeps
    if busy > QUIET:
        say(f"warning: the machine is not quiet, others use {busy:.1f} cores: measure again later")
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} cores ({processor()}), "
        f"{memory:.0f} GiB, Python {platform.python_version()}, load average {load}, "
        f"{busy:.1f} cores used by others"
    )


def say(text: str) -> None:
    """Progress, on standard error, so that standard output is the report."""
    print(text, file=sys.stderr, flush=True)
