"""Prefetch: a thread builds the next window while the step runs on this one.

A window is a function of its position, so the thread only changes when it is built. A window that
is requested out of order (after a skip, a resume, a rollback) is built on the spot, and the
loader's position stays that of the window in use. Each window has its own thread, which ends with
it. So there is nothing to close, and an error is raised where the window is used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from ...batch import Window

Position = tuple[int, int]  # epoch, and index in it


@dataclass
class Prefetch:
    """Builds one window ahead."""

    ready: Callable[[Window], Window]  # what is done to a window before it is needed
    _running: tuple[Position, Future[Window]] | None = field(default=None, init=False, repr=False)

    def begin(self, at: Position, make: Callable[[int, int], Window]) -> None:
        """Start a thread that builds the window at ``at``."""
        made: Future[Window] = Future()

        def run() -> None:
            try:
                made.set_result(self.ready(make(*at)))
            except BaseException as error:  # raised where the window is taken
                made.set_exception(error)

        threading.Thread(target=run, name="surefoot-prefetch", daemon=True).start()
        self._running = at, made

    def forget(self) -> None:
        """Drop the window that is being built."""
        self._running = None

    def take(self, at: Position) -> Window | None:
        """The window at ``at``, if that is what was made ahead. Raises what ``make`` did."""
        running, self._running = self._running, None
        return running[1].result() if running is not None and running[0] == at else None


def for_device(where: torch.device) -> Prefetch | None:
    """Prefetched windows for a GPU, in pinned memory. None for a CPU: there the thread competes
    with the step, which costs 6 ms per window to save 1 ms."""
    if where.type != "cuda":
        return None

    def ready(window: Window) -> Window:
        with torch.cuda.device(where):  # each thread has a current one, and this is a new thread
            return [batch.located().pinned() for batch in window]

    return Prefetch(ready)
