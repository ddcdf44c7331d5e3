"""What a piece of work costs its process: seconds, bytes from the disk; with nothing in the cache.

Standard library only: it also runs beside MindSpore. Memory is watched from outside (reshard.py).
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path


def evict(folder: Path) -> None:
    """Take the files under ``folder`` out of the page cache, once they are on the disk."""
    for path in filter(Path.is_file, folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def sync(folder: Path) -> None:
    """Flush every file under ``folder``, and its name."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def report(work: Callable[[], object], source: Path, target: Path) -> None:
    """Do ``work``, flush ``target``, and print what it cost, children included."""
    evict(source)
    print("ready", flush=True)
    read, used, began = _read(), cpu(), time.perf_counter()
    work()
    if target.exists():
        sync(target)
    costs = {
        "seconds": time.perf_counter() - began,
        "cpu": cpu() - used,
        "read_mb": (_read() - read) / 1e6,
    }
    print(json.dumps(costs), flush=True)


def _read() -> int:
    """Bytes that were fetched from the disk so far, for maps of files as well."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def cpu() -> float:
    """Seconds of the processor so far, of this process and of its children that ended."""
    own, theirs = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + theirs.ru_utime + theirs.ru_stime
