"""Local launcher: starts the ranks of a run on this machine, and ends them together.

If a launcher (torchrun, SLURM, Kubernetes) has already started the ranks, there is nothing to do.
The first rank that fails decides: the others are ended at once, and its exit code is that of the
run. So its error is the one shown, and not the connection errors of the others. This process
imports nothing: a fork server (``fork_server``) has imported, at the first launch and at restarts.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from ..errors import HUNG, OUT_OF_MEMORY, SKIPPED_STEPS, STOP_SIGNALS, RunError
from ..log import fell_back
from ..storage.cgroups import usable_cores
from ..storage.child import BEGAN, LAUNCHER, die_with_launcher
from .fork_server import ForkedRank, ForkServer
from .section import ParallelSection, launched
from .sharding import AXES

logger = logging.getLogger(__name__)
_PAUSE = 0.05  # seconds between two looks
_GRACE = 5.0  # seconds for a process to end after another one has failed
_STOPPED = tuple(128 + number for number in STOP_SIGNALS)
_ENDED = (0, SKIPPED_STEPS, *_STOPPED)  # exit codes of ranks that did what they were asked to
_USER_ERROR = 2
_MOST_LOWERED = 64  # halvings of batch sizes in one run, of training, forward passes and sampling
_WHY = {
    signal.SIGKILL: " (by hand, by a scheduler, or by the system because memory was short: "
    "`surefoot plan` estimates what a rank needs)",
    signal.SIGSEGV: " (a crash in native code)",
    signal.SIGBUS: " (a mapped file was truncated, or shared memory is full)",
}


def num_processes(section: ParallelSection) -> int:
    """The number of ranks to start: 1 if another launcher has started them, or if one is enough."""
    if launched() is not None:
        return 1
    requested = section.num_processes or _num_gpus()
    sizes: list[int] = [getattr(section, axis) or 1 for axis in AXES]
    return max(1, requested, math.prod(sizes))


def _num_gpus() -> int:
    import torch  # a second of a core, which a run that names its ranks need not wait for

    return torch.cuda.device_count()


def launch(
    command: Sequence[str], count: int, max_restarts: int = 0, *, forks: bool = False
) -> int:
    """Run ``command`` in ``count`` ranks that find each other; returns the exit code of the run.

    Signals that stop a run are forwarded, so that one to this process stops the run like a run of
    one process. If a rank dies, all are restarted, up to ``max_restarts`` times; they resume from
    the latest checkpoint. Restarts after a rank has lowered its batch sizes do not count.
    ``forks``: ``command`` calls ``fork_ranks``, by which it becomes the fork server of all ranks.
    Raises ``RunError`` if a rank cannot be started.
    """
    die_with_launcher()  # such as a sweep, whose trial this is
    attempt, num_lowered = 0, 0
    server: ForkServer | None = None
    try:
        while True:
            if forks and (server is None or server.code is not None):
                server = _fork_server(command, count, server)
            gang = _ProcessGroup(command, count, server)
            code = gang.run()
            forks, server = gang.server is not None, gang.server
            if code == OUT_OF_MEMORY and not gang.was_stopped and num_lowered < _MOST_LOWERED:
                num_lowered += 1
                logger.warning("restarting all ranks with smaller batches")
                continue
            if code in _ENDED or gang.was_stopped or code == _USER_ERROR or attempt == max_restarts:
                return code  # 2: an error of the user's, which another start will not mend
            logger.warning(
                "a rank ended with exit code %d: restarting all ranks (restart %d of %d)",
                code,
                attempt + 1,
                max_restarts,
            )
            attempt += 1
    finally:
        if server is not None:
            server.end()


def _fork_server(command: Sequence[str], count: int, dead: ForkServer | None) -> ForkServer:
    if dead is not None:
        dead.end()
    try:
        return ForkServer(command, {**_threads(count), **os.environ}, count)
    except OSError as error:
        raise RunError(f"the {count} ranks cannot be started: {error.strerror}") from error


def _threads(count: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(max(1, usable_cores() // count))}


# Not torch.distributed.run: its agent kills ranks 30 s after SIGTERM, which a large save may need
# longer than, and prints every rank's echo of the first failure (docs/decisions/0021).
class _ProcessGroup:
    """The ranks of one launch: forks of a ``server``, or programs."""

    def __init__(
        self, command: Sequence[str], count: int, server: ForkServer | None = None
    ) -> None:
        self.command, self.count, self.server = command, count, server
        self.processes: list[subprocess.Popen[bytes] | ForkedRank] = []
        self._is_started = self._is_signaled = False
        self._began = time.time()  # before imports, which are part of the time to start
        self._early: list[int] = []  # signals before all ranks were there

    @property
    def was_stopped(self) -> bool:
        """Whether a signal was forwarded, or the ranks have agreed among themselves to stop: one
        has got a signal, a callback's ``stop_signal`` or a ``surefoot stop``."""
        return self._is_signaled or any(each.returncode in _STOPPED for each in self.processes)

    def run(self) -> int:
        """Start all and wait for them: 0, or the code of the first that failed, as a shell reports
        it. Raises ``RunError`` if one cannot be started."""
        # nohup ignores one
        heard = [s for s in STOP_SIGNALS if signal.getsignal(s) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._hand_on) for number in heard}
        try:
            self.start()
            return self.watch()
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)

    def start(self) -> None:
        """Start all ranks. Raises ``RunError`` if one cannot be started."""
        if self.server is not None and not self._is_served(self.server):
            return  # which ``watch`` sees
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
            try:
                socket.create_connection(("127.0.0.1", port), timeout=10).close()
            except OSError as error:
                raise RunError(
                    "parallel.num_processes: the ranks of a machine meet at 127.0.0.1, which this "
                    f"one does not reach ({error}); switch its loopback interface on (`ip link set "
                    "lo up`), or train in one process (parallel.num_processes=1)"
                ) from None
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        shared["WORLD_SIZE"] = str(self.count)
        for rank in range(self.count):
            try:
                process = self._begin({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            except OSError as error:
                raise RunError(
                    f"rank {rank} of {self.count} cannot be started: {error.strerror}"
                ) from error
            if process is None:
                return
            self.processes.append(process)
        self._is_started = True
        for number in self._early:
            self._hand_on(number, None)

    def _is_served(self, server: ForkServer) -> bool:
        """Wait until the fork server has imported: whether ranks can be started now, as programs
        if it cannot fork. They cannot if it has ended, or if a signal has come."""
        while not (server.is_ready or self._early or server.code is not None):
            server.listen(_PAUSE)
        if server.reason:
            fell_back(
                "each rank imports for itself",
                server.reason,
                "takes some seconds of a core for each rank at every start",
            )
            server.end()
            self.server = None
        self._is_signaled = bool(self._early)
        return server.is_ready and not self._is_signaled

    def _begin(self, variables: dict[str, str]) -> subprocess.Popen[bytes] | ForkedRank | None:
        """Start a rank; None if the fork server is dead. Raises ``OSError``."""
        if self.server is not None:
            return self.server.start({**variables, BEGAN: str(self._began)})
        own = {**variables, LAUNCHER: str(os.getpid())}
        # a session of its own: Ctrl-C reaches it through this process alone
        return subprocess.Popen(
            self.command,
            env={**_threads(self.count), **os.environ, **own},
            start_new_session=True,
        )

    def watch(self) -> int:
        """Wait for all ranks that were started, as ``run`` does."""
        while (failed := self._first_failure()) is None:
            codes = [process.poll() for process in self.processes]
            if codes and all(code in _ENDED for code in codes):
                return max(code or 0 for code in codes)
            if self._is_signaled and not self._is_started:
                return 128 + self._early[0]
            if self.server is None:
                time.sleep(_PAUSE)
            else:
                self.server.listen(_PAUSE)
        rank, code = failed
        if not self.was_stopped:
            _report(rank, code)
        return 128 - code if code < 0 else code

    def _first_failure(self) -> tuple[int | None, int] | None:
        """The rank that failed, None for the fork server, and its exit code. Of several at once one
        that was killed by a signal: the others echo its end."""
        code_of_server = None if self.server is None else self.server.code
        codes = [(process.poll() or 0, rank) for rank, process in enumerate(self.processes)]
        failed = [(code, rank) for code, rank in codes if code not in _ENDED]
        if failed:
            code, rank = min(failed)
            return rank, code
        has_ended = [process.returncode is not None for process in self.processes]
        if code_of_server is None or (has_ended and all(has_ended)):
            return None
        return None, code_of_server

    def _hand_on(self, number: int, _frame: FrameType | None) -> None:
        if not self._is_started:
            self._early.append(number)
            return
        self._is_signaled = True
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def _end(self) -> None:
        """End the ranks that are left after one has failed; stopped ones get some time to save, as
        do those whose fork server died, upon which they get SIGTERM."""
        is_orphaned = self.server is not None and self.server.code is not None
        deadline = time.monotonic() + (_GRACE if self.was_stopped or is_orphaned else 0.0)
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        for process in self.processes:  # which end side by side
            with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a disk
                process.wait(_GRACE)


def _report(rank: int | None, code: int) -> None:
    """Say which rank ended the run, None for the fork server; an error that it could explain, it
    has explained itself."""
    who = "the process that forks the ranks" if rank is None else f"rank {rank}"
    if code >= 0:
        if code not in (_USER_ERROR, HUNG):
            logger.error("%s ended with exit code %d; its own message says why", who, code)
        return
    how = f"{signal.Signals(-code).name}{_WHY.get(signal.Signals(-code), '')}"
    others = "all" if rank is None else "the other"
    logger.error(
        "%s was killed by %s, so %s ranks are ended. Run the same command to resume from the "
        "latest checkpoint",
        *(who, how, others),
    )


def rerun_command(arguments: Sequence[str]) -> list[str]:
    """The command that runs this program with ``arguments``. ``-P``: a file of the current folder
    such as ``random.py`` is no module of it."""
    return [sys.executable, "-P", "-m", "surefoot", *arguments]
