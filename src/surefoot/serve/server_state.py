"""What the addresses of the server share: models, engine, limits, and open requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from starlette.responses import Response

from ..generate.live import RowSettings, Token
from ..generate.requests import Request
from .errors import ApiError, ServerBusyError
from .metrics import Metrics
from .running.engine import EngineThread, FailedRequest, Sink
from .running.models import Models, ServedModel
from .running.settings import ServeSettings

T = TypeVar("T")
_GONE = 499  # the client has closed the connection; nobody reads it
_SHARE = 0.1  # of the newest response in the mean of their seconds


@dataclass(eq=False)
class ServerState:
    """One server. Its methods belong to the event loop."""

    settings: ServeSettings
    engine: EngineThread = field(default_factory=EngineThread)
    metrics: Metrics = field(default_factory=Metrics)
    models: Models = field(init=False)
    num_open: int = 0  # responses that are waiting or being generated
    _seconds: float = 1.0  # that a response takes, from recent ones

    def __post_init__(self) -> None:
        self.models = Models(self.settings, self.engine)

    @asynccontextmanager
    async def answering(
        self, model: ServedModel, rows: Sequence[tuple[Request, RowSettings]]
    ) -> AsyncIterator[AsyncIterator[tuple[int, Token]]]:
        """The tokens of ``rows`` as they come, each with the place of its row. Rows that are not
        complete when the block ends are dropped. Raises ``ServerBusyError``."""
        self.check_room(len(rows))
        places = {request.index: place for place, (request, _) in enumerate(rows)}
        sink: Sink = asyncio.Queue()
        self.num_open += len(rows)
        started = time.monotonic()
        prompts = {id(request.prompt): len(request.prompt) for request, _ in rows}
        self.metrics.prompt_tokens.inc(sum(prompts.values()))
        self.engine.submit(model.lane, rows, sink)
        try:
            yield self._tokens(sink, places, started)
        finally:
            self.num_open -= len(rows)
            if places:
                self.engine.drop(list(places))

    async def compute(self, model: ServedModel, work: Callable[[], T]) -> T:
        """The result of ``work``, done with the weights of ``model`` between two steps. Raises
        ``ServerBusyError``."""
        self.check_room(1)

        def run() -> T:
            model.activate()
            return work()

        self.num_open += 1
        try:
            return await asyncio.wrap_future(self.engine.call(run))
        finally:
            self.num_open -= 1

    async def _tokens(
        self, sink: Sink, places: dict[int, int], started: float
    ) -> AsyncIterator[tuple[int, Token]]:
        is_first = True
        while places:
            event = await sink.get()
            place = places[event.index]
            if isinstance(event, FailedRequest):
                del places[event.index]
                if isinstance(event.error, ApiError):
                    raise event.error
                raise ApiError(f"the model has failed: {event.error}", status=500)
            if is_first:
                self.metrics.first_token.observe(time.monotonic() - started)
                is_first = False
            self.metrics.tokens.inc()
            if event.finish_reason is not None:
                del places[event.index]
                self._note(time.monotonic() - started)
            yield place, event

    def _note(self, seconds: float) -> None:
        self.metrics.seconds.observe(seconds)
        self._seconds += _SHARE * (seconds - self._seconds)

    def check_room(self, count: int) -> None:
        """Raise ``ServerBusyError`` if there is no room for ``count`` responses now; ``ApiError``
        if there never is. Asked before anything is made for them."""
        most = self.settings.max_batch + self.settings.max_waiting
        if count > most:
            raise ApiError(
                f"the request is for {count:,} responses, and this server takes {most:,} at a "
                "time; send fewer prompts, or a smaller n",
                param="n",
            )
        if self.num_open + count > most:
            waiting = max(0, self.num_open - self.settings.max_batch)
            rounds = 1 + waiting / self.settings.max_batch
            self.metrics.refused.inc()
            raise ServerBusyError(waiting, min(60, max(1, round(rounds * self._seconds))))


async def unless_gone(http: HttpRequest, work: Coroutine[Any, Any, T]) -> T | Response:
    """The result of ``work``, which is cancelled if the client closes the connection."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return Response(status_code=_GONE)
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
