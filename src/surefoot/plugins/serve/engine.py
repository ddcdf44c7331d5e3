"""The one thread that runs models: requests of all models advance in turn, a token each, those to
models that share rows in one pass.

Whatever changes a model happens in this thread, between two steps. What it generates is handed to
the event loop of the server, all tokens of a step at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import TypeVar

from ...generate.live import Rows, RowSettings, Token
from ...generate.responses import Request
from .body import ModelGoneError

logger = logging.getLogger(__name__)
T = TypeVar("T")
_SECONDS = 0.05  # for which tokens of a step that takes long are held back


@dataclass(frozen=True)
class FailedRequest:
    """A request that cannot be answered."""

    index: int
    error: Exception


Event = Token | FailedRequest
Sink = asyncio.Queue[Event]


@dataclass(eq=False)
class Lane:
    """The requests to one model. Lanes with the same ``rows`` advance in one pass."""

    rows: Rows
    activate: Callable[[], None] = lambda: None  # make the weights those that ``rows`` are for
    adapter: str | None = None  # that ``rows`` are to compute its requests with


class EngineThread:
    """Runs until ``close``."""

    def __init__(self) -> None:
        self._lanes: list[Lane] = []
        self._leaving: list[tuple[Lane, Callable[[], None]]] = []  # once they have no requests
        self._commands = SimpleQueue[Callable[[], None]]()
        self._sinks: dict[int, tuple[Lane, Sink]] = {}
        self._dropped: set[int] = set()
        self._numbers = itertools.count()
        self._events: list[tuple[Sink, Event]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._delivered_at = 0.0
        self.num_steps = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin; events go to queues of ``loop``."""
        self._loop = loop
        self._thread.start()

    def close(self) -> None:
        """End after the current step."""

        def end() -> None:
            self._is_closed = True

        self._commands.put(end)
        if self._thread.is_alive():
            self._thread.join()

    def number(self) -> int:
        """An index for a request."""
        return next(self._numbers)

    @property
    def num_running(self) -> int:
        """Responses that are being generated."""
        return sum(lane.rows.num_running for lane in self._passes())

    @property
    def num_waiting(self) -> int:
        """Requests that are not begun."""
        return sum(lane.rows.num_waiting for lane in self._passes())

    def submit(
        self, lane: Lane, requests: Sequence[tuple[Request, RowSettings]], sink: Sink
    ) -> None:
        """Answer ``requests``; their tokens go to ``sink``."""

        def add() -> None:
            for request, settings in requests:
                if request.index in self._dropped:
                    continue
                # Its prompt was prepared while the model was unloaded: it would wait for ever.
                if lane not in self._lanes:
                    self._events.append((sink, FailedRequest(request.index, ModelGoneError())))
                    continue
                self._sinks[request.index] = (lane, sink)
                lane.rows.add(replace(request, adapter=lane.adapter), settings)

        self._commands.put(add)

    def drop(self, indices: Sequence[int]) -> None:
        """Nobody waits for these requests any more; they free their slots."""
        self._dropped.update(indices)

        def drop() -> None:
            for index in indices:
                if index in self._sinks:
                    lane, _ = self._sinks.pop(index)
                    lane.rows.drop(index)
                self._dropped.discard(index)

        self._commands.put(drop)

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Do ``work`` between two steps, unless its result is cancelled before; its result."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:  # it is raised where the result is awaited
                future.set_exception(error)

        self._commands.put(run)
        return future

    def add_lane(self, lane: Lane) -> None:
        """Take in another model."""
        self._commands.put(lambda: self._lanes.append(lane))

    def remove_lane(self, lane: Lane, then: Callable[[], None] = lambda: None) -> None:
        """Let a model go, once its requests are answered."""
        self._commands.put(lambda: self._leaving.append((lane, then)))

    def _run(self) -> None:
        while self._next_commands():
            for lane in self._passes():
                if _has_requests(lane.rows):
                    self._step(lane)
            self._let_go()
            self._deliver()

    def _passes(self) -> list[Lane]:
        """One lane for all that share rows."""
        return list({id(lane.rows): lane for lane in list(self._lanes)}.values())

    def _let_go(self) -> None:
        """Remove the lanes that are to be freed and have no requests."""
        busy = {id(lane) for lane, _ in self._sinks.values()}
        gone = [each for each in self._leaving if id(each[0]) not in busy]
        for lane, then in gone:
            self._leaving.remove((lane, then))
            self._lanes.remove(lane)
            try:
                then()
            except Exception:  # of PEFT's code: the other models go on
                logger.exception("a model could not be unloaded")

    def _next_commands(self) -> bool:
        """Do the commands that came since the last step, and wait for one if there is no request.
        Whether there will be more."""
        has_work = any(_has_requests(lane.rows) for lane in self._passes())
        with contextlib.suppress(Empty):
            self._commands.get(block=not has_work)()
            while not self._is_closed:
                self._commands.get_nowait()()
        return not self._is_closed

    def _step(self, lane: Lane) -> None:
        self.num_steps += 1
        try:
            lane.activate()
            lane.rows.step(self._emit)
        except Exception as error:  # of a model's code, or out of memory: its requests fail
            logger.exception("a step has failed; its requests are not answered")
            lane.rows.clear()
            indices = [i for i, (other, _) in self._sinks.items() if other.rows is lane.rows]
            for index in indices:
                self._events.append((self._sinks.pop(index)[1], FailedRequest(index, error)))

    def _emit(self, token: Token) -> bool:
        if token.index in self._dropped or token.index not in self._sinks:
            return False
        sink = self._sinks[token.index][1]
        self._events.append((sink, token))
        if token.finish_reason is not None:
            del self._sinks[token.index]
        if time.monotonic() - self._delivered_at > _SECONDS:
            self._deliver()
        return True

    def _deliver(self) -> None:
        self._delivered_at = time.monotonic()
        events, self._events = self._events, []
        if events and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_put, events)


def _has_requests(rows: Rows) -> bool:
    return bool(rows.num_running or rows.num_waiting)


def _put(events: Sequence[tuple[Sink, Event]]) -> None:
    for sink, event in events:
        sink.put_nowait(event)
