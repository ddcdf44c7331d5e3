"""Fork server of the ranks of one machine: a process that imports once, and forks each rank.

The launcher imports nothing. It starts this process with the command line of a rank, which does
all that a rank does before the ranks differ: it reads the recipe and imports torch. There
``fork_ranks`` waits for orders; each is a fork, in which the function returns, so that a rank goes
on from there. Imports are nine tenths of a restart (docs/decisions/0111). ``ForkServer`` is the
launcher's side: it sends orders, and knows how each rank ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import STOP_SIGNALS
from ..storage.child import BEGAN, LAUNCHER, die_with_launcher

VARIABLE = "SUREFOOT_FORK_SERVER"  # of a fork server: where its orders come from, number of ranks
_PAUSE = 0.02  # seconds between two looks for ranks that have ended
_LARGEST = 1 << 17  # bytes of a message


class ForkServer:
    """The fork server that ``command`` becomes in ``environment``, and its ``count`` ranks. Raises
    ``OSError`` if it cannot be started."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], count: int) -> None:
        # A message is received as it was sent: no lines, no buffer.
        self._channel, orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with orders:
            own = {LAUNCHER: str(os.getpid()), VARIABLE: f"{orders.fileno()} {count}"}
            self.process = subprocess.Popen(
                command,
                env={**environment, **own},
                pass_fds=[orders.fileno()],
                start_new_session=True,  # Ctrl-C reaches ranks through the launcher alone
            )
        self.is_ready = False
        self.reason = ""  # why it cannot fork
        self.is_left = False  # by all processes: it and its ranks have ended
        self._ranks: dict[int, ForkedRank] = {}
        self._answers: list[ForkedRank | OSError] = []

    @property
    def code(self) -> int | None:
        """Its exit code; None while it lives."""
        return self.process.poll()

    def listen(self, seconds: float = 0.0) -> None:
        """Take its messages; if there are none, wait up to ``seconds`` for one."""
        if self.is_left:
            time.sleep(seconds)
        while not self.is_left and select.select([self._channel], [], [], seconds)[0]:
            seconds = 0.0
            try:
                message = json.loads(self._channel.recv(_LARGEST) or b"{}")
            except ConnectionResetError:  # it was killed, and had an order to read
                message = {}
            if not message:
                self.is_left = True
            elif "ready" in message:
                self.is_ready, self.reason = True, message["ready"]
            elif "errno" in message:
                self._answers.append(OSError(message["errno"], message["error"]))
            elif "code" in message:
                self._ranks[message["pid"]].returncode = message["code"]
            else:
                rank = self._ranks[message["pid"]] = ForkedRank(self, message["pid"])
                self._answers.append(rank)

    def start(self, variables: Mapping[str, str]) -> ForkedRank | None:
        """Fork a rank that has ``variables`` in its environment; None if this process is dead.
        Raises ``OSError``."""
        with contextlib.suppress(BrokenPipeError):
            self._channel.send(json.dumps(variables).encode())
        while not self._answers:
            if self.code is not None:
                return None
            self.listen(_PAUSE)
        answer = self._answers.pop()
        if isinstance(answer, OSError):
            raise answer
        return answer

    def end(self) -> None:
        """End it. Ranks that are left get SIGTERM by the system."""
        self._channel.close()
        self.process.kill()
        self.process.wait()


class ForkedRank:
    """A rank, with what a launcher needs of ``subprocess.Popen``."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.server, self.pid = server, pid
        self.returncode: int | None = None  # stays so if the fork server dies first

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        self.server.listen()
        return self.returncode

    def wait(self, timeout: float = math.inf) -> None:
        """Wait for its end. Raises ``subprocess.TimeoutExpired``."""
        deadline = time.monotonic() + timeout
        while self.poll() is None and not self.server.is_left:
            if (left := deadline - time.monotonic()) <= 0:
                raise subprocess.TimeoutExpired("rank", timeout)
            self.server.listen(min(left, _PAUSE))

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it has not ended. No other process has its number: the fork server
        leaves it a zombie."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the fork server is dead
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


def fork_ranks(prepare: Callable[[int], None]) -> None:
    """Import by ``prepare``, which gets the number of ranks; fork one for each order of the
    launcher, and end with it. Returns in a rank only. If this process cannot be forked, it says why
    and ends."""
    die_with_launcher(signal.SIGKILL)
    descriptor, count = map(int, os.environ.pop(VARIABLE).split())
    prepare(count)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:  # they are for the ranks, which may take minutes to save
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)
    reason = _why_not()
    _say(channel, ready=reason)
    if reason:
        raise SystemExit
    ranks: set[int] = set()
    ended: set[int] = set()
    while True:
        if select.select([channel], [], [], _PAUSE)[0]:
            if not (order := channel.recv(_LARGEST)):  # the launcher is gone
                os._exit(0)
            while ended:
                os.waitpid(ended.pop(), 0)
            if (pid := _fork(json.loads(order), handlers, channel)) is None:
                return
            ranks |= {pid} - {0}
        for pid in [*ranks]:
            # Left a zombie, so that the launcher sends no signal to another process of its number.
            how = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if how is not None:
                ranks.remove(pid)
                ended.add(pid)
                code = how.si_status if how.si_code == os.CLD_EXITED else -how.si_status
                _say(channel, pid=pid, code=code)


def _fork(
    variables: Mapping[str, str], handlers: Mapping[signal.Signals, Any], channel: socket.socket
) -> int | None:
    """Fork a rank, and say its number, 0 if the system refuses; None in the rank itself."""
    # What waits in buffers would be written by each fork.
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
    # A signal for a rank waits until the rank has its handlers.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        try:
            pid = os.fork()
        except OSError as error:
            _say(channel, errno=error.errno, error=error.strerror)
            return 0
        if pid:
            _say(channel, pid=pid)
            return pid
        # Left open: by its end the launcher knows that no rank is left, also if this process was
        # killed, and cannot say so.
        channel.detach()
        _become_rank(variables, handlers)
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _why_not() -> str:
    """Why this process cannot be forked; empty if it can. Threads and CUDA do not survive a fork,
    but for threads that end before one, such as those of OpenBLAS: hence a fork is tried."""
    torch = sys.modules.get("torch")
    if not (pid := os.fork()):
        is_lost = torch is not None and torch.cuda._is_in_bad_fork()
        os._exit(int(is_lost))
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1:
        return "an imported module has initialized CUDA"
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return "" if len(names) == 1 else f"an imported module has started threads ({names})"


def _become_rank(variables: Mapping[str, str], handlers: Mapping[signal.Signals, Any]) -> None:
    """Let this fork be as a process that was started with ``variables`` in its environment."""
    os.setsid()
    began = f"{variables[BEGAN]} {os.getpid()}"
    os.environ.update({**variables, BEGAN: began, LAUNCHER: str(os.getppid())})
    if (random := sys.modules.get("numpy.random")) is not None:  # Python's own sees the fork
        random.seed()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _say(channel: socket.socket, **message: object) -> None:
    """Send a message to the launcher; if it is gone, the next look for orders notices."""
    with contextlib.suppress(BrokenPipeError):
        channel.send(json.dumps(message).encode())
