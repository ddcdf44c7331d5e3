"""Prefetch: a thread builds the next window while the step runs on this one.

A window is a function of its position, so the thread only changes when it is built. A window that
is requested out of order (after a skip, a resume, a rollback) is built on the spot, and the
loader's position stays that of the window in use. Each window has its own thread, which ends with
it. So there is nothing to close, and an error is raised where the window is used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ...batch import Window

Position = tuple[int, int]  # epoch, and index in it


@dataclass
class Prefetch:
    """Builds one window ahead."""

    ready: Callable[[Window], Window]  # what is done to a window before it is needed
    _running: _Making | None = field(default=None, init=False, repr=False)

    def begin(self, at: Position, make: Callable[[int, int], Window]) -> None:
        """Start a thread that builds the window at ``at``."""
        self._running = _Making(at, lambda: self.ready(make(*at)))

    def take(self, at: Position) -> Window | None:
        """The window at ``at``, if that is what was made ahead. Raises what ``make`` did."""
        running, self._running = self._running, None
        return running.result() if running is not None and running.at == at else None


def for_device(where: torch.device) -> Prefetch | None:
    """Prefetched windows for a GPU, in pinned memory. None for a CPU: there the thread competes
    with the step, which costs 6 ms per window to save 1 ms.
    """
    if where.type != "cuda":
        return None

    def ready(window: Window) -> Window:
        with torch.cuda.device(where):  # each thread has a current one, and this is a new thread
            return [batch.located().pinned() for batch in window]

    return Prefetch(ready)


class _Making:
    """One window in flight."""

    def __init__(self, at: Position, make: Callable[[], Window]) -> None:
        self.at, self._make = at, make
        self._found: Window | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="surefoot-prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._make()
        except BaseException as error:  # raised where the window is taken
            self._error = error

    def result(self) -> Window:
        """Wait for it."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._found is not None
        return self._found
