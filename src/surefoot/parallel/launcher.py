"""Local launcher: starts the ranks of a run on this machine, and ends them together.

If a launcher (torchrun, SLURM, Kubernetes) has already started the ranks, there is nothing to do.
The first rank that fails decides: the others are ended at once, and its exit code is that of the
run. So its error is the one shown, and not the connection errors of the others.
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

import torch

from ..errors import HUNG, OUT_OF_MEMORY, SKIPPED_STEPS, STOP_SIGNALS, RunError
from ..storage.cgroups import usable_cores
from ..storage.child import LAUNCHER
from .section import ParallelSection, launched
from .sharding import AXES
from .world import die_with_launcher

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
    requested = section.num_processes or torch.cuda.device_count()
    sizes: list[int] = [getattr(section, axis) or 1 for axis in AXES]
    return max(1, requested, math.prod(sizes))


def launch(command: Sequence[str], count: int, max_restarts: int = 0) -> int:
    """Run ``command`` in ``count`` ranks that find each other; returns the exit code of the run.

    Signals that stop a run are forwarded, so that one to this process stops the run like a run of
    one process. If a rank dies, all are restarted, up to ``max_restarts`` times; they resume from
    the latest checkpoint. Restarts after a rank has lowered its batch sizes do not count. Raises
    ``RunError`` if a rank cannot be started.
    """
    die_with_launcher()  # such as a sweep, whose trial this is
    attempt, num_lowered = 0, 0
    while True:
        gang = _ProcessGroup(command, count)
        code = gang.run()
        if code == OUT_OF_MEMORY and not gang.was_stopped and num_lowered < _MOST_LOWERED:
            num_lowered += 1
            logger.warning("restarting all ranks with smaller batches")
            continue
        if code in _ENDED or gang.was_stopped or code == _USER_ERROR or attempt == max_restarts:
            break  # 2: an error of the user's, which another start will not mend
        logger.warning(
            "a rank ended with exit code %d: restarting all ranks (restart %d of %d)",
            code,
            attempt + 1,
            max_restarts,
        )
        attempt += 1
    return code


# Not torch.distributed.run: its agent kills ranks 30 s after SIGTERM, which a large save may need
# longer than, and prints every rank's echo of the first failure (docs/decisions/0021).
class _ProcessGroup:
    """The ranks of one launch."""

    def __init__(self, command: Sequence[str], count: int) -> None:
        self.command, self.count = command, count
        self.processes: list[subprocess.Popen[bytes]] = []
        self._is_started = self._is_signaled = False
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
        threads = str(max(1, usable_cores() // self.count))
        for rank in range(self.count):
            rank_variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                LAUNCHER: str(os.getpid()),
            }
            try:
                # a session of its own: Ctrl-C reaches it through this process alone
                process = subprocess.Popen(
                    self.command,
                    env={"OMP_NUM_THREADS": threads, **os.environ, **shared, **rank_variables},
                    start_new_session=True,
                )
            except OSError as error:
                raise RunError(
                    f"rank {rank} of {self.count} cannot be started: {error.strerror}"
                ) from error
            self.processes.append(process)
        self._is_started = True
        for number in self._early:
            self._hand_on(number, None)

    def watch(self) -> int:
        """Wait for all ranks that were started, as ``run`` does."""
        while (failed := self._first_failure()) is None:
            codes = [process.poll() for process in self.processes]
            if all(code in _ENDED for code in codes):
                return max(code or 0 for code in codes)
            time.sleep(_PAUSE)
        rank, code = failed
        if not self.was_stopped:
            _report(rank, code)
        return 128 - code if code < 0 else code

    def _first_failure(self) -> tuple[int, int] | None:
        """The rank that failed, and its exit code. Of several at once one that was killed by a
        signal: the others echo its end."""
        codes = [(process.poll() or 0, rank) for rank, process in enumerate(self.processes)]
        failed = [(code, rank) for code, rank in codes if code not in _ENDED]
        if not failed:
            return None
        code, rank = min(failed)
        return rank, code

    def _hand_on(self, number: int, _frame: FrameType | None) -> None:
        if not self._is_started:
            self._early.append(number)
            return
        self._is_signaled = True
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def _end(self) -> None:
        """End the ranks that are left after one has failed; stopped ones get some time to save."""
        deadline = time.monotonic() + (_GRACE if self.was_stopped else 0.0)
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a disk
                    process.wait(_GRACE)


def _report(rank: int, code: int) -> None:
    """Say which rank ended the run; an error that it could explain, it has explained itself."""
    if code >= 0:
        if code not in (_USER_ERROR, HUNG):
            logger.error("rank %d ended with exit code %d; its own message says why", rank, code)
        return
    how = f"{signal.Signals(-code).name}{_WHY.get(signal.Signals(-code), '')}"
    logger.error(
        "rank %d was killed by %s, so the other ranks are ended. Run the same command to resume "
        "from the latest checkpoint",
        rank,
        how,
    )


def rerun_command(arguments: Sequence[str]) -> list[str]:
    """The command that runs this program with ``arguments``. ``-P``: a file of the current folder
    such as ``random.py`` is no module of it."""
    return [sys.executable, "-P", "-m", "surefoot", *arguments]
