"""A child process: how it starts, the lines of JSON that it reads and writes, and how it ends.

It has a session of its own, so that Ctrl-C is for the process that has started it, and ends with
that process at the latest: by its finalizer, or because it asks for that as the number in
``LAUNCHER`` says. The writer of checkpoints outlives its process on purpose, and is none of these.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import sysconfig
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .files import open_log

LAUNCHER = "SUREFOOT_LAUNCHER"  # number of the process that has started this one
BEGAN = "SUREFOOT_BEGAN"  # of a fork: when its start was wanted, in seconds since 1970; its number
_PACKAGES = str(Path(__file__).parents[2])  # where this very package lies
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
Message = dict[str, Any]


def die_with_launcher(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask the system to send this process a signal if its parent process dies: by SIGTERM, a rank
    saves."""
    if LAUNCHER in os.environ:
        with contextlib.suppress(OSError, AttributeError):  # only Linux can
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != int(os.environ[LAUNCHER]):  # it has died already
            os.kill(os.getpid(), number)


class Child:
    """``python ARGUMENTS``, such as ``-m MODULE``. Raises ``OSError`` if it cannot be started."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        log: Path | None = None,
        talks: bool = False,
        environment: Mapping[str, str] | None = None,
        patience: float = 5.0,
    ) -> None:
        """
        Args:
            arguments: of the interpreter.
            log: a file for what it prints; None: where this process prints.
            talks: whether it reads and writes messages, on its standard input and output.
            environment: what it has beside that of this process.
            patience: seconds from SIGTERM to SIGKILL when it is ended; 0: SIGKILL at once.
        """
        variables = {LAUNCHER: str(os.getpid()), **(environment or {})}
        if sysconfig.get_path("purelib") != _PACKAGES:  # it may be found nowhere else
            paths = [os.environ.get("PYTHONPATH"), _PACKAGES]
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        with contextlib.nullcontext() if log is None else open_log(log, is_empty=True) as output:
            self.process = subprocess.Popen(
                # -P: no module of the current folder. With a `random.py` or `rich.py` there, ranks
                # crashed at their start.
                [sys.executable, "-P", *arguments],
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else output,
                stderr=output,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        self._unread = b""
        self._end = weakref.finalize(self, _end, self.process, patience, os.getpid())

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.process.poll()

    @property
    def killed_by(self) -> str | None:
        """The signal that has ended it, if one has."""
        code = self.process.wait()
        return signal.Signals(-code).name if code < 0 else None

    @property
    def ending(self) -> str:
        """How it has ended, for messages."""
        by = self.killed_by
        return f"with code {self.process.returncode}" if by is None else f"by {by}"

    def send(self, message: Mapping[str, object], *, wait: bool = True) -> bool:
        """Send a message; False if it has ended, or without ``wait`` does not read it now."""
        assert self.process.stdin is not None
        pipe = self.process.stdin.fileno()
        left = memoryview(json.dumps(message, default=str).encode() + b"\n")
        os.set_blocking(pipe, wait)
        try:
            while left:
                left = left[os.write(pipe, left) :]
        except (BlockingIOError, BrokenPipeError):
            return False
        return True

    def messages(self) -> Iterator[Message]:
        """What it has said so far, without waiting."""
        while (message := self.answer(0.0)) is not None:
            yield message

    def answer(self, seconds: float) -> Message | None:
        """Its next message; None if it says none for ``seconds``. Raises ``EOFError`` if it has
        ended."""
        deadline = time.monotonic() + seconds
        assert self.process.stdout is not None
        while b"\n" not in self._unread:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self.process.stdout], [], [], left)[0]:
                return None
            # Not readline(): select() sees the pipe alone, not a second message in a buffer of
            # Python's.
            if not (part := os.read(self.process.stdout.fileno(), 1 << 16)):
                raise EOFError
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return dict(json.loads(line))

    def end(self) -> None:
        """End it now, with all that it has started."""
        self._end()

    def release(self, *, wait: bool) -> None:
        """Send nothing more: it ends once it has done what it was sent, and may outlive this
        process unless it is waited for."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        # Else the finalizer would kill it while it still works.
        self._end.detach()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        if wait:
            self.process.wait()
        self.process.stdout.close()


def _end(process: subprocess.Popen[bytes], patience: float, pid: int) -> None:
    if os.getpid() != pid:  # in a copy of the process that has started it
        return
    for number in (signal.SIGTERM, signal.SIGKILL) if patience else (signal.SIGKILL,):
        with contextlib.suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
            # It leads a session, so its id is also that of its group.
            os.killpg(process.pid, number)  # and what it has left behind, if it has ended
            process.wait(patience or None)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # of what was written to it last
                pipe.close()
