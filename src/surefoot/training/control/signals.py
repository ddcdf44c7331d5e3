"""Graceful shutdown: the first signal ends the run after its step, an insistent one at once."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType

from ...errors import STOP_SIGNALS

logger = logging.getLogger(__name__)
INSISTENT = (signal.SIGTERM, signal.SIGINT)  # a second one of these exits immediately
_OUTPUTS = (1, 2)  # descriptors


def stop_signals() -> list[signal.Signals]:
    """The signals that stop a run: without those that are ignored, as SIGHUP is under nohup."""
    return [s for s in STOP_SIGNALS if s in INSISTENT or signal.getsignal(s) != signal.SIG_IGN]


class StopSignal:
    """A context in which a signal becomes a request, named ``received``. It may be nested."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._num_insistent = 0
        self._terminals: list[int] = []
        self._before: dict[signal.Signals, object] = {}
        self._depth = 0

    def __enter__(self) -> StopSignal:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not self._depth:  # elsewhere Python forbids handlers
            self._terminals = [number for number in _OUTPUTS if os.isatty(number)]
            self._before = {s: signal.signal(s, self._receive) for s in stop_signals()}
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._leave_closed_terminals()
        # A closed terminal may send SIGHUP twice, and SIGTERM may follow SIGUSR1: neither insists.
        # The kernel sends SIGXCPU each second.
        self._num_insistent += number in INSISTENT
        if self._num_insistent > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.received is None:
            self.received = signal.Signals(number)
            again = "it again" if number in INSISTENT else "SIGTERM twice"
            logger.warning(
                "%s received: finishing this step and saving; send %s to exit immediately",
                self.received.name,
                again,
            )

    def _leave_closed_terminals(self) -> None:
        """Write nowhere what went to a terminal that is gone: there it would be an error."""
        for number in self._terminals:
            if not os.isatty(number):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, number)
                os.close(nowhere)
