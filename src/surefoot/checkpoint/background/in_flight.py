"""Start a save: asynchronous if the system supports it, otherwise synchronous."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from ...errors import CheckpointError
from ..saving.job import MOST_ATTEMPTS, Job, Saved
from ..saving.preparation import LiveTensors
from ..saving.writing import write
from .snapshot_buffer import is_available
from .writer_process import Background

logger = logging.getLogger(__name__)


def start_save(
    background: Background, job: Job, live: LiveTensors, *, in_background: bool = True
) -> Saved | None:
    """Start to write ``job``, or write it now; what was saved in that case."""
    if in_background and not background.is_off:
        why = "this system does not support the shared memory that is needed"
        if is_available():
            try:
                background.start(job, live)
                return None
            except MemoryError as error:
                why = f"no room for a snapshot of the state ({error})"
            except CheckpointError as error:
                why = str(error)
        logger.warning("asynchronous saves are off (%s): training waits for every save", why)
        background.is_off = True
    return _write(job, live)


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
