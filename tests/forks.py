"""``subprocess`` as the product and its tests use it, but forked: nothing is imported twice.

``forks.put(module)`` lets ``module`` start its processes so, or this module stands for
``subprocess`` in it. What a process runs is what it would run as ``python -m``, ``python -c`` or
``python FILE``, with the same pipes, environment and signals. ``warm`` forks from a process that
has done nothing but import.
"""

import contextlib
import faulthandler
import gc
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from subprocess import DEVNULL, PIPE, TimeoutExpired
from types import ModuleType, SimpleNamespace

import torch

from surefoot.parallel import fork_server

DEFAULTS = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
DEFAULTS[signal.SIGINT] = signal.default_int_handler
HAS_WATCH = True  # not in what pytest itself forks: its thread watches, which no copy has
STREAMS = (("stdin", "w"), ("stdout", "r"), ("stderr", "r"))  # ours is the other end


# Torch makes its pool of threads anew in a fork; where two threads are the first to ask for it
# there, one of them gets none ("Invalid thread pool!").
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))


def put(module, prepare=lambda command: None):
    """``prepare`` is called in every new process before it begins."""
    made = lambda *args, **options: Popen(*args, prepare=prepare, **options)  # noqa: E731
    module.subprocess = SimpleNamespace(
        Popen=made, PIPE=PIPE, DEVNULL=DEVNULL, TimeoutExpired=TimeoutExpired
    )


class Popen:
    """A child that runs ``[python, ..., "-m", module, *arguments]``."""

    def __init__(
        self,
        command,
        *,
        env=None,
        cwd=None,
        text=False,
        pass_fds=(),
        start_new_session=False,
        prepare=lambda command: None,
        **streams,
    ):
        self.returncode, self.stdin, self.stdout, self.stderr = None, None, None, None
        theirs = {}
        for number, (name, mode) in enumerate(STREAMS):
            wanted = streams.pop(name, None)
            if wanted == DEVNULL:
                theirs[number] = os.open(os.devnull, os.O_RDWR)
            elif wanted == PIPE:
                ends = os.pipe()
                ours, theirs[number] = ends if mode == "r" else reversed(ends)
                setattr(self, name, os.fdopen(ours, mode if text else f"{mode}b"))
            elif wanted is not None:
                theirs[number] = os.dup(wanted if isinstance(wanted, int) else wanted.fileno())
        assert not streams, f"unknown options {streams}"
        place = (dict(env or os.environ), str(cwd or Path.cwd()))
        self._begin(theirs, [*map(str, command)], place, pass_fds, start_new_session, prepare)
        for descriptor in theirs.values():
            os.close(descriptor)

    def _begin(self, theirs, *birth):
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                code = become(theirs, *birth)
            finally:
                os._exit(code)

    def __enter__(self):
        return self

    def __exit__(self, error, *_):
        if error is not None:
            self.kill()  # else a failed test waits for what it has not come to end
        for name, _ in STREAMS:
            if stream := getattr(self, name):
                stream.close()
        self.wait()

    def poll(self):
        return self._ended(os.WNOHANG)

    def wait(self, timeout=None):
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._ended(0 if deadline is None else os.WNOHANG) is None:
            if time.monotonic() > deadline:
                raise TimeoutExpired("fork", timeout)
            time.sleep(0.005)
        return self.returncode

    def communicate(self, stdin=None, timeout=None):
        """What it writes to the end of its life."""
        said = {}

        def listen(name, stream):
            with stream:
                said[name] = stream.read()

        readers = [
            threading.Thread(target=listen, args=(name, stream))
            for name in ("stdout", "stderr")
            if (stream := getattr(self, name))
        ]
        for reader in readers:
            reader.start()
        if self.stdin:
            with contextlib.suppress(BrokenPipeError), self.stdin:
                if stdin:
                    self.stdin.write(stdin)
        self.wait(timeout)
        for reader in readers:
            reader.join()
        return said.get("stdout"), said.get("stderr")

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def _ended(self, how):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def run(command, *, capture_output=False, check=False, timeout=None, popen=Popen, **options):
    """``subprocess.run``."""
    if capture_output:
        options |= {"stdout": PIPE, "stderr": PIPE}
    with popen(command, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, out, err)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _watch():
    if WATCHED == [True]:
        faulthandler.dump_traceback_later(240, exit=True)


def _watch_rank():
    """A fork server must not have the thread that watches, as no copy has it; its ranks have."""
    WATCHED[:] = [WATCHED == ["ranks"]]
    _watch()


# A copy has no thread that watches, but would wait for it: a sweep starts trials.
WATCHED = [False]  # this process, or the "ranks" that are forks of it
os.register_at_fork(
    before=lambda: WATCHED == [True] and faulthandler.cancel_dump_traceback_later(),
    after_in_parent=_watch,
    after_in_child=_watch_rank,
)


def become(theirs, command, place, pass_fds, start_new_session, prepare):
    """Be that process to its end: its exit code."""
    gc.freeze()  # else a collection of garbage writes to, and so copies, every page there is
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
        sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        environment, folder = place
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.path[:0] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        for number, handler in DEFAULTS.items():
            signal.signal(number, handler)
        os.nice = lambda increment: 0  # a test waits for it, and should not wait for all others
        if HAS_WATCH:
            # Whoever hangs says where, before the worker that waits for it is ended as hanging.
            WATCHED[:] = ["ranks" if fork_server.VARIABLE in environment else True]
            _watch()
        prepare(command)
        return _run(*_parsed(command))
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()


def _parsed(command):
    """How python is told what to run, what that is, and its arguments."""
    _, *words = command
    while words[0].startswith("-") and words[0] not in ("-m", "-c"):
        words.pop(0)
    return words if words[0] in ("-m", "-c") else ["", *words]


def _run(how, what, *arguments):
    sys.argv = [what if how == "" else how, *arguments]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is imported already
        try:
            if how == "-m":
                runpy.run_module(what, run_name="__main__", alter_sys=True)
            elif how == "-c":
                main = sys.modules["__main__"] = ModuleType("__main__")
                exec(compile(what, "<string>", "exec"), vars(main))
            else:
                runpy.run_path(what, run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
