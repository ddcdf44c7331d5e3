"""Free memory: that of the machine, within the limits of every cgroup this process belongs to; a
lock for processes that would take it at the same time; and short garbage collections.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import resource
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..log import announced
from .cgroups import PROC, groups, lines

# of torch, CUDA and C++, in lower case
_SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "bad_alloc")
_CACHED = ("active_file", "inactive_file")  # pages that the kernel drops when memory is short


@dataclass(frozen=True)
class _Version:
    """How one version of cgroups names its files."""

    limits: Sequence[str]
    used: str
    prefix: str  # in memory.stat, of sums that include the groups below


_VERSIONS = {
    # Beyond memory.high nothing is killed, but every allocation is slowed down until memory is
    # freed.
    "cgroup2": _Version(("memory.max", "memory.high"), "memory.current", ""),
    "cgroup": _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"),
}


def free_memory(proc: Path = PROC) -> int | None:
    """Bytes to allocate without swapping and without being killed; None if unknown."""
    limits = (_of_group(folder, _VERSIONS[kind]) for folder, kind in groups("memory", proc))
    all_limits = (_of_machine(proc), _of_process(proc), *limits)
    return min((free for free in all_limits if free is not None), default=None)


@contextlib.contextmanager
def only_new_collected() -> Iterator[None]:
    """Garbage collections inside walk what is made inside only. torch and transformers make 400,000
    objects that stay: a walk over them took 0.2 of the 1.2 seconds of a merge of a gigabyte."""
    if gc.get_freeze_count():  # the program has set them aside for good
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is an allocation that failed, on a GPU or in main memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # By its words: torch raises a plain RuntimeError for main memory, and is not imported here.
    is_torch = isinstance(error, RuntimeError) and any(s in str(error).lower() for s in _SIGNS)
    return isinstance(error, MemoryError) or is_torch


def allocator_message(error: BaseException) -> str:
    """The allocator's message without its advice, which may be many lines."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].partition(" Including non-PyTorch")[0].removesuffix(".")


@contextlib.contextmanager
def exclusive(name: str) -> Iterator[None]:
    """Run the block in one process of this user on this machine at a time; without a place for the
    lock, in any."""
    # A name for each user: a file of another user's in /tmp could not be opened.
    path = Path(tempfile.gettempdir()) / f"surefoot-{name}-{os.getuid()}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        announcement = announced("another process that holds %s, until it ends", path)
        with announcement, contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _of_machine(proc: Path) -> int | None:
    sizes = [line.split()[1] for line in lines(proc / "meminfo") if line.startswith("MemAvail")]
    return int(sizes[0]) * 1024 if sizes else None


def _of_process(proc: Path) -> int | None:
    """Bytes of address space that are left below the limit of this process (``ulimit -v``)."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    words = lines(proc / "self" / "statm")
    if limit == resource.RLIM_INFINITY or not words:
        return None
    return max(0, limit - int(words[0].split()[0]) * resource.getpagesize())


def _of_group(folder: Path, version: _Version) -> int | None:
    """Bytes that are free within the limits of one cgroup; None if it has none."""
    words = [lines(folder / name) for name in version.limits]
    # Version 2 writes "max" where there is no limit.
    limits = [int(word[0]) for word in words if word and word[0].isdigit()]
    used = lines(folder / version.used)
    if not limits or not used:
        return None
    pairs = [line.split() for line in lines(folder / "memory.stat")]
    sizes = {name: int(size) for name, size in pairs}
    cached = sum(sizes.get(version.prefix + name, sizes.get(name, 0)) for name in _CACHED)
    return max(0, min(limits) - int(used[0]) + cached)
