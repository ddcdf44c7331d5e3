"""Graceful shutdown: the first SIGTERM or SIGINT ends the run after its step, the next at once."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType

logger = logging.getLogger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """A context in which a signal becomes a request, named ``received``. It may be nested."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}
        self._depth = 0

    def __enter__(self) -> StopSignal:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not self._depth:  # elsewhere Python forbids handlers
            self._before = {s: signal.signal(s, self._receive) for s in SIGNALS}
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.received = signal.Signals(number)
        logger.warning(
            "%s received: finishing this step and saving; send it again to exit immediately",
            self.received.name,
        )
