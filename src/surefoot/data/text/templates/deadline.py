"""A limit of time for each rendering, as a template may loop for some texts alone.

Nothing ends a thread from outside. But between two operations of a thread, Python raises what
another thread has asked for; so a watcher interrupts every loop, though no single long operation.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ....errors import TemplateLimitError, counted

SECONDS = 20  # of a core; real templates take milliseconds
_POLL = 0.25  # seconds of the clock
T = TypeVar("T")


class _ExpiredError(BaseException):
    """Raised in a thread that renders for too long; no handler of a template takes it."""


@dataclass
class _Rendering:
    """One rendering of one thread."""

    end: float  # of the thread's processor time
    is_expired: bool = False


class Deadline:
    """Ends renderings that take more than ``SECONDS``, in any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._renderings: dict[int, _Rendering] = {}  # by thread
        self._count = 0  # renderings so far
        self._watcher: threading.Thread | None = None

    def run(self, work: Callable[[], T]) -> T:
        """The result of ``work``. Raises ``TemplateLimitError`` if it takes too long."""
        me = threading.get_ident()
        try:
            self._begin(me)
            try:
                return work()
            finally:
                self._end(me)
        except _ExpiredError:
            self._renderings.pop(me, None)  # it may have been raised before ``_end`` did that
        raise TemplateLimitError(
            f"the chat template renders this conversation for more than "
            f"{counted(SECONDS, 'second')}; data.template: NAME takes another"
        )

    def _begin(self, me: int) -> None:
        with self._lock:
            self._count += 1
            self._renderings[me] = _Rendering(time.thread_time() + SECONDS)
            if self._watcher is None or not self._watcher.is_alive():  # as in a fork
                self._watcher = threading.Thread(target=self._watch, daemon=True)
                self._watcher.start()

    def _end(self, me: int) -> None:
        """From here on, nothing is raised in this thread but by itself."""
        with self._lock:
            if self._renderings.pop(me).is_expired:
                _raise_in(me, None)
                raise _ExpiredError

    def _watch(self) -> None:
        """Look at all renderings now and then, as long as there are new ones."""
        before = -1
        while True:
            time.sleep(_POLL)
            with self._lock:
                if not self._renderings and before == self._count:
                    self._watcher = None
                    return
                before = self._count
                for thread, rendering in self._renderings.items():
                    if not rendering.is_expired and _processor_time(thread) > rendering.end:
                        rendering.is_expired = True
                        _raise_in(thread, _ExpiredError)


def _processor_time(thread: int) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise ``error`` in ``thread`` as soon as it runs Python; None: what was not raised yet never
    is."""
    given = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), given)
