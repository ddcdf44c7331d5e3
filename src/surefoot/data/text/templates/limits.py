"""A limit of time and memory for a template, which may be a stranger's.

Jinja's sandbox keeps a template from files and attributes, not from ``{{ 9 ** 9 ** 9 }}`` or loops
without end, and nothing in Python interrupts a single operation. So short conversations are first
rendered in a fork, which the system ends.
"""

from __future__ import annotations

import os
import resource
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from ....errors import TemplateError, counted

SECONDS = 5  # of a core; real templates take milliseconds
MEMORY = 1 << 30  # bytes beyond those of this process
_PATIENCE = 60  # seconds of the clock
_FORKS = 3  # until one does not stand still
_NO_MEMORY = 3  # exit code
_ADVICE = "do not use it; data.template: NAME takes another"


def try_within_limits(work: Callable[[], object]) -> None:
    """Run ``work`` in a fork, which may take ``SECONDS`` of a core and ``MEMORY``.

    Raises ``TemplateError`` if it needs more. Its result and other errors are lost with the fork.
    """
    code = next((c for _ in range(_FORKS) if (c := _forked(work)) is not None), -signal.SIGKILL)
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        raise TemplateError(
            f"the chat template renders a short conversation for more than "
            f"{counted(SECONDS, 'second')}; {_ADVICE}"
        )
    if code == _NO_MEMORY:
        raise TemplateError(
            f"the chat template needs more than {MEMORY >> 20:,} MiB for a short conversation; "
            f"{_ADVICE}"
        )


def _forked(work: Callable[[], object]) -> int | None:
    """The exit code of a fork that runs ``work``; None if it stands still: a fork may find a lock
    taken by a thread that it has not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads: the fork only renders
        pid = os.fork()
    if not pid:
        code = 1
        try:
            code = _worked(work)
        finally:
            os._exit(code)
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _worked(work: Callable[[], object]) -> int:
    """The exit code of the fork."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (room := _address_space()) is not None:
        resource.setrlimit(resource.RLIMIT_AS, (room + MEMORY, room + MEMORY))
    try:
        work()
    except MemoryError:
        return _NO_MEMORY
    except Exception:
        return 0  # as the template rejects a conversation: told where it is rendered
    return 0


def _address_space() -> int | None:
    """Bytes of address space of this process; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return None
    return pages * resource.getpagesize()
