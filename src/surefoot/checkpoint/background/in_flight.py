"""The in-flight save: asynchronous if the system supports it, otherwise synchronous. At most one
at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...errors import CheckpointError
from ..saving.job import MOST_ATTEMPTS, Job, Saved
from ..saving.preparation import LiveTensors
from ..saving.writing import write
from .snapshot_buffer import is_available
from .writer_process import Background

logger = logging.getLogger(__name__)


class InFlightSave:
    """``target`` is the checkpoint that is being written, if there is one.

    An error of the background save is raised by the next call, and the save is over then.
    """

    def __init__(self) -> None:
        self.target: Path | None = None
        self._background = Background()
        self._is_grounded = False

    @property
    def pid(self) -> int | None:
        """Process id of the writer process; None if there is none."""
        return self._background.pid

    def start(self, job: Job, live: LiveTensors, *, in_background: bool = True) -> Saved | None:
        """Start to write ``job``, or write it completely; returns what was saved in that case.

        The live tensors may change afterwards. Raises ``CheckpointError``.
        """
        if in_background and not self._is_grounded:
            if self._take_off(job, live):
                return None
            self._is_grounded = True
        return _warned(_write(job, live))

    def poll(self) -> Saved | None:
        """The committed save, if the save in flight has ended."""
        return self._ask(wait=False)

    def wait(self) -> Saved | None:
        """Wait for the save in flight; returns what was committed."""
        return self._ask(wait=True)

    def close(self) -> None:
        """Wait for the save in flight, and end the writer process."""
        self._background.close()

    def _take_off(self, job: Job, live: LiveTensors) -> bool:
        why = "this system does not support the shared memory that is needed"
        if is_available():
            try:
                self._background.start(job, live)
                self.target = job.target
                return True
            except MemoryError as error:
                why = f"no room for a snapshot of the state ({error})"
        logger.warning("asynchronous saves are off (%s): training waits for every save", why)
        return False

    def _ask(self, *, wait: bool) -> Saved | None:
        try:
            saved = self._background.wait() if wait else self._background.poll()
        except CheckpointError:
            self.target = None
            raise
        if saved is None:
            return None
        self.target = None
        return _warned(saved)


def end(close: Callable[[], None], error: BaseException | None) -> None:
    """Run ``close`` at the end of a block; its error is only logged if there is an ``error``."""
    try:
        close()
    except CheckpointError as failure:
        if error is None:
            raise
        logger.error("%s", failure)


def _write(job: Job, live: LiveTensors) -> Saved:
    """Write synchronously; again, if ranks of a joint save have failed."""
    while True:
        is_last = job.nonce is None or job.attempt + 1 >= MOST_ATTEMPTS
        try:
            saved = write(job, live)
        except CheckpointError:
            if is_last:
                raise
        else:
            if is_last or saved.is_committed:
                return saved
        job = replace(job, attempt=job.attempt + 1)


def _warned(saved: Saved) -> Saved:
    if saved.problem:
        logger.warning("%s", saved.problem)
    logger.debug(
        "%s: %d bytes, %d of them shared, in %.2f s",
        saved.path.name,
        saved.num_bytes,
        saved.num_shared,
        saved.seconds,
    )
    return saved
