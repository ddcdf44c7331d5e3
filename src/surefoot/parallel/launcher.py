"""Local launcher: starts the ranks of a run on this machine, and ends them together.

If a launcher (torchrun, SLURM, Kubernetes) has already started the ranks, there is nothing to do.
The first rank that fails decides: the others are ended at once, and its exit code is that of the
run. So its error is the one shown, and not the connection errors of the others.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

import torch

from .section import ParallelSection
from .world import LAUNCHER, launched

logger = logging.getLogger(__name__)
_PAUSE = 0.05  # seconds between two looks
_GRACE = 5.0  # seconds for a process to end after another one has failed
_STOPS = (signal.SIGINT, signal.SIGTERM)


def num_processes(section: ParallelSection) -> int:
    """The number of ranks to start: 1 if another launcher has started them, or if one is enough."""
    if launched() is not None:
        return 1
    wanted = section.num_processes or torch.cuda.device_count()
    axes = section.pp * section.dp_replicate * (section.dp_shard or 1) * section.tp
    return max(1, wanted, axes)


def launch(command: Sequence[str], count: int, max_restarts: int = 0) -> int:
    """Run ``command`` in ``count`` ranks that find each other; returns the exit code of the run.

    SIGINT and SIGTERM are forwarded, so that a signal to this process stops the run like a run of
    one process. If a rank dies, all are restarted, up to ``max_restarts`` times; they resume from
    the latest checkpoint.
    """
    for attempt in range(max_restarts + 1):
        gang = _ProcessGroup(command, count)
        code = gang.watch()
        if code == 0 or gang.was_stopped or code == 2 or attempt == max_restarts:
            break  # 2: an error of the user's, which another start will not mend
        logger.warning(
            "a rank ended with exit code %d: restarting all ranks (restart %d of %d)",
            code,
            attempt + 1,
            max_restarts,
        )
    return code


class _ProcessGroup:
    """The ranks of one launch."""

    def __init__(self, command: Sequence[str], count: int) -> None:
        self.was_stopped = False
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
        threads = max(1, (os.cpu_count() or 1) // count)
        self.processes = [
            subprocess.Popen(
                command,
                env={
                    "OMP_NUM_THREADS": str(threads),
                    **os.environ,
                    **shared,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    LAUNCHER: str(os.getpid()),
                },
                start_new_session=True,  # Ctrl-C reaches them through this process alone
            )
            for rank in range(count)
        ]

    def watch(self) -> int:
        """Wait for all: 0, or the code of the first that failed, as a shell reports it."""
        before = {number: signal.signal(number, self._hand_on) for number in _STOPS}
        try:
            while (code := self._first_failure()) is None:
                if all(process.poll() == 0 for process in self.processes):
                    return 0
                time.sleep(_PAUSE)
            return code
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _first_failure(self) -> int | None:
        codes = [process.poll() for process in self.processes]
        failed = [code for code in codes if code]
        if not failed:
            return None
        code = min(failed)  # of several at once, one killed by a signal: the others echo its end
        return 128 - code if code < 0 else code

    def _hand_on(self, number: int, _frame: FrameType | None) -> None:
        self.was_stopped = True
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def _end(self) -> None:
        """Give stopped ranks the time to save; end the others of a failed run immediately."""
        deadline = time.monotonic() + (_GRACE if self.was_stopped else 0.0)
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def rerun_command(arguments: Sequence[str]) -> list[str]:
    """The command that runs this program with ``arguments``."""
    return [sys.executable, "-m", "surefoot", *arguments]
