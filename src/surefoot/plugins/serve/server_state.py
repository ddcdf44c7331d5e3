"""What the addresses of the server share: models, engine, limits, figures, and open requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.responses import Response

from ...generate.live import RowSettings, Token
from ...generate.requests import Request
from .engine import EngineThread, FailedRequest, Sink
from .errors import ApiError, ServerBusyError
from .models import Models, ServedModel, ServeSettings

T = TypeVar("T")
_GONE = 499  # the client has closed the connection; nobody reads it
_SHARE = 0.1  # of the newest response in the mean of their seconds
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_FIRST, _ALL = "surefoot_time_to_first_token_seconds", "surefoot_response_seconds"
_LAST = "From a request to the last token of a response"


class Metrics:
    """Figures of one server for Prometheus."""

    def __init__(self) -> None:
        own = self._registry = CollectorRegistry()
        labels, first = ["path", "status"], "From a request to its first token"
        self.requests = Counter(
            "surefoot_requests", "Requests by address and status", labels, registry=own
        )
        self.prompt_tokens = Counter("surefoot_prompt_tokens", "Tokens of prompts", registry=own)
        self.tokens = Counter("surefoot_generated_tokens", "Tokens of responses", registry=own)
        refused = "Requests for which there was no room"
        self.refused = Counter("surefoot_refused_requests", refused, registry=own)
        self.first_token = Histogram(_FIRST, first, buckets=_SECONDS, registry=own)
        self.seconds = Histogram(_ALL, _LAST, buckets=_SECONDS, registry=own)

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A value that is read at each scrape."""
        Gauge(f"surefoot_{name}", text, registry=self._registry).set_function(read)

    def text(self) -> bytes:
        """All of them in Prometheus' format."""
        return generate_latest(self._registry)


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
        watch, engine = self.metrics.watch, self.engine
        watch("rows_running", "Responses being generated", lambda: engine.num_running)
        watch("rows_waiting", "Responses without a slot", lambda: engine.num_waiting)
        watch("rows_open", "Responses that clients wait for", lambda: self.num_open)
        watch("passes", "Passes of models, of a token each", lambda: engine.num_steps)

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
                seconds = time.monotonic() - started
                self.metrics.seconds.observe(seconds)
                self._seconds += _SHARE * (seconds - self._seconds)
            yield place, event

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

    async def left() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else Response(status_code=_GONE)
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
