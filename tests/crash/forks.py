"""``subprocess`` as this package uses it, but forked: nothing is imported twice.

``forks.put(module)`` lets ``module`` start its processes so. What a process runs is what it would
run as ``python -m``, with the same pipes, environment and signals.
"""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
import warnings
from types import SimpleNamespace

DEFAULTS = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
DEFAULTS[signal.SIGINT] = signal.default_int_handler


def put(module, prepare=lambda command: None):
    """``prepare`` is called in every new process before it begins."""
    made = lambda *args, **options: Popen(*args, prepare=prepare, **options)  # noqa: E731
    module.subprocess = SimpleNamespace(
        Popen=made, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
    )


class Popen:
    """A child that runs ``[python, ..., "-m", module, *arguments]``."""

    def __init__(
        self,
        command,
        *,
        env=None,
        stdin=None,
        stdout=None,
        stderr=None,
        pass_fds=(),
        start_new_session=False,
        prepare=lambda command: None,
    ):
        self.returncode, self.stdin, self.stdout = None, None, None
        theirs = {}
        if stdin == subprocess.PIPE:
            theirs[0], ours = os.pipe()
            self.stdin = os.fdopen(ours, "wb")
        if stdout == subprocess.PIPE:
            ours, theirs[1] = os.pipe()
            self.stdout = os.fdopen(ours, "rb")
        elif stdout is not None:
            theirs[1] = stdout.fileno()
        if stderr is not None:
            theirs[2] = stderr.fileno()
        self.pid = os.fork()
        if not self.pid:
            _become(command, env or os.environ, theirs, pass_fds, start_new_session, prepare)
        for number in (0, 1):
            if theirs.get(number) is not None and PIPED[number](self) is not None:
                os.close(theirs[number])

    def poll(self):
        return self._ended(os.WNOHANG)

    def wait(self, timeout=None):
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._ended(0 if deadline is None else os.WNOHANG) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork", timeout)
            time.sleep(0.005)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def _ended(self, how):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


PIPED = {0: lambda process: process.stdin, 1: lambda process: process.stdout}


def _become(command, env, theirs, pass_fds, start_new_session, prepare):
    """Be that process, and never return."""
    code = 1
    try:
        if start_new_session:
            os.setsid()
        for number, descriptor in theirs.items():
            os.dup2(descriptor, number)
        kept = sorted({0, 1, 2, *pass_fds})
        for before, after in zip([*kept], [*kept[1:], 65_536], strict=True):
            os.closerange(before + 1, after)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        environment = dict(env)
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in DEFAULTS.items():
            signal.signal(number, handler)
        at = command.index("-m")
        sys.argv = [command[at + 1], *command[at + 2 :]]
        prepare(command)
        code = _run(command[at + 1])
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is imported already
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
