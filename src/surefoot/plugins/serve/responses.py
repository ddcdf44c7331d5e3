"""From a request to its answer: who is let in, the tokens that the engine gives, and the answer as
a stream of chunks or in one piece, in which the chunks are put together.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from ...errors import DataError
from ...generate.live import RowSettings, Token
from ...generate.responses import Request
from .body import ApiError, post
from .engine import EngineThread, FailedRequest, Sink
from .models import Models, ServedModel, ServeSettings
from .sampling import SamplingBody

logger = logging.getLogger(__name__)
SECONDS_TO_READ = 60  # for which a client of a stream may read nothing
_GONE = 499  # the client has closed the connection; nobody reads it
# Threads of their own, so that requests without pictures never wait for one. Pixels of a request
# may be hundreds of megabytes, and their answers come one after another.
_PICTURE_THREADS, _PICTURE_PLACES = 2, 4
_SHARE = 0.1  # of the newest response in the mean of their seconds
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
Choice = dict[str, Any]  # one response of an answer, or a part of one
Rows = Sequence[tuple[Request, RowSettings]]
Chunks = AsyncGenerator[Mapping[str, object], None]
B = TypeVar("B", bound=SamplingBody)
T = TypeVar("T")


def answer_at(
    router: APIRouter, path: str, kind: type[ServedResponses[B]], body: type[B], state: ServerState
) -> None:
    """Answer requests to ``path`` with responses of a ``kind``."""

    @post(router, path, body, kind.prepared.__doc__)
    async def answer(request_body: B, http: HttpRequest) -> Response:
        state.check_room(request_body.num_responses)
        model = await state.models.get(request_body.model)
        # in a thread: a template, a tokenizer and a grammar take time that grows with the request
        prepare = partial(kind.prepared, state.engine, model, request_body)
        if request_body.may_have_pictures:
            responses = await state.in_picture_thread(prepare)
        else:
            responses = await asyncio.to_thread(prepare)
        if not request_body.stream:
            return await _unless_gone(http, responses.answer(state))
        chunks = responses.chunks(state)
        return EventStream(await anext(chunks), chunks)


class ServerState:
    """What the addresses of one server share. Its methods belong to the event loop."""

    def __init__(self, settings: ServeSettings) -> None:
        self.engine = EngineThread()
        self.models = Models(settings, self.engine)
        self._max_batch = settings.max_batch
        self._most = settings.max_batch + settings.max_waiting
        self._picture_threads = ThreadPoolExecutor(_PICTURE_THREADS, "pictures")
        self._picture_places = asyncio.Semaphore(_PICTURE_PLACES)
        self._num_open = 0  # responses that are waiting or being generated
        self._num_tokens = 0  # of all responses so far
        self._seconds = 1.0  # that a response takes, from recent ones

    @property
    def figures(self) -> dict[str, int]:
        """How much is being done, and how much was done since the start."""
        return {
            "responses_open": self._num_open,
            "responses_running": self.engine.num_running,
            "responses_waiting": self.engine.num_waiting,
            "passes": self.engine.num_steps,
            "generated_tokens": self._num_tokens,
        }

    def check_room(self, count: int) -> None:
        """Raise ``ApiError`` if there is no room for ``count`` responses: now, with the time after
        which to try again, or ever. Asked before anything is made for them."""
        if count > self._most:
            raise ApiError(
                f"the request is for {count:,} responses, and this server takes {self._most:,} at "
                "a time; send fewer prompts, or a smaller n",
                param="n",
            )
        if self._num_open + count > self._most:
            waiting = max(0, self._num_open - self._max_batch)
            rounds = 1 + waiting / self._max_batch
            seconds = min(60, max(1, round(rounds * self._seconds)))
            raise ApiError(
                f"{waiting:,} requests are waiting already; try again in {seconds} s",
                status=429,
                code="queue_full",
                headers={"Retry-After": str(seconds)},
            )

    async def in_picture_thread(self, work: Callable[[], T]) -> T:
        """The result of ``work`` with pictures, of which two are read at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._picture_threads, work)

    @asynccontextmanager
    async def _with_pixels(self, rows: Rows) -> AsyncIterator[Rows]:
        """``rows``, all of one prompt or without pictures, once the pixels of these are read."""
        pictures = rows[0][0].pictures if rows else None
        if pictures is None:
            yield rows
            return
        async with self._picture_places:
            try:
                ready = await self.in_picture_thread(pictures.read)
            except DataError as error:
                raise ApiError(f"messages: {error}", param="messages") from None
            yield [(replace(request, pictures=ready), settings) for request, settings in rows]

    @asynccontextmanager
    async def answering(
        self, model: ServedModel, rows: Rows
    ) -> AsyncIterator[AsyncIterator[tuple[int, Token]]]:
        """The tokens of ``rows`` as they come, each with the place of its row. Rows that are not
        complete when the block ends are dropped. Raises ``ApiError``."""
        self.check_room(len(rows))
        places = {request.index: place for place, (request, _) in enumerate(rows)}
        sink: Sink = asyncio.Queue()
        started = time.monotonic()
        self._num_open += len(rows)
        try:
            async with self._with_pixels(rows) as ready:
                self.engine.submit(model.lane, ready, sink)
                yield self._tokens(sink, places, started)
        finally:
            self._num_open -= len(rows)
            self.engine.drop(list(places))

    async def _tokens(
        self, sink: Sink, places: dict[int, int], started: float
    ) -> AsyncIterator[tuple[int, Token]]:
        while places:
            event = await sink.get()
            place = places[event.index]
            if isinstance(event, FailedRequest):
                del places[event.index]
                if isinstance(event.error, ApiError):
                    raise event.error
                raise ApiError(f"the model has failed: {event.error}", status=500)
            self._num_tokens += 1
            if event.finish_reason is not None:
                del places[event.index]
                self._seconds += _SHARE * (time.monotonic() - started - self._seconds)
            yield place, event


@dataclass(eq=False)
class ServedResponses(ABC, Generic[B]):
    """A request that is ready to be answered: its model, its rows, and the prompts of these."""

    model: ServedModel
    body: B
    prompts: Sequence[Sequence[int]]
    rows: Rows
    created: int = field(default_factory=lambda: int(time.time()))

    prefix: ClassVar[str]
    kind: ClassVar[str]
    kind_of_chunk: ClassVar[str]

    @classmethod
    @abstractmethod
    def prepared(cls, engine: EngineThread, model: ServedModel, body: B) -> ServedResponses[B]:
        """The responses to a request. Raises ``ApiError``."""

    @abstractmethod
    def first(self) -> list[Choice]:
        """What a stream begins with."""

    @abstractmethod
    def parts(self, place: int, token: Token) -> list[Choice]:
        """What the next token of a row adds to its response."""

    @abstractmethod
    def whole(self, place: int, joined: Choice) -> Choice:
        """The response of a row, from all its parts."""

    def more(self) -> dict[str, object]:
        """What an answer in one piece, or the first chunks of a stream, have besides."""
        return {}

    def head(self, kind: str) -> dict[str, object]:
        """What an answer, and each of its chunks, begins with."""
        name = f"{self.prefix}-{secrets.token_hex(12)}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model.name}

    def usage(self, count: int) -> dict[str, int]:
        """Tokens of prompts, each counted once, and of all responses, with those that end them."""
        prompt = sum(map(len, self.prompts))
        total = prompt + count
        return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": total}

    async def chunks(self, state: ServerState) -> Chunks:
        """The answer piece by piece."""
        head, count = self.head(self.kind_of_chunk), 0
        options = self.body.stream_options
        has_usage = options is not None and bool(options.include_usage)
        rest: dict[str, object] = {"usage": None} if has_usage else {}
        async with state.answering(self.model, self.rows) as tokens:
            for choice in self.first():
                yield {**head, "choices": [choice], **self.more(), **rest}
            async for place, token in tokens:
                count += 1
                for choice in self.parts(place, token):
                    yield {**head, "choices": [choice], **rest}
        if has_usage:
            yield {**head, "choices": [], "usage": self.usage(count)}

    async def answer(self, state: ServerState) -> Response:
        """The answer in one piece."""
        joined: list[Choice] = [{"index": place} for place in range(len(self.rows))]
        count = 0
        async with state.answering(self.model, self.rows) as tokens:
            async for place, token in tokens:
                count += 1
                for part in self.parts(place, token):
                    _join(joined[place], part)
        choices = [self.whole(place, choice) for place, choice in enumerate(joined)]
        completion = {**self.head(self.kind), "choices": choices, "usage": self.usage(count)}
        return await asyncio.to_thread(JSONResponse, {**completion, **self.more()})


def _join(joined: Choice, part: Choice) -> None:
    """Add a part: texts and lists follow those before, all else stays as it came first."""
    for name, value in part.items():
        if isinstance(value, dict):
            joined[name] = joined.get(name) or {}
            _join(joined[name], value)
        elif joined.get(name) is None:
            joined[name] = list(value) if isinstance(value, list) else value
        elif isinstance(value, str | list):
            joined[name] += value


class EventStream(StreamingResponse):
    """Chunks as server-sent events, ended by OpenAI's last line. The first chunk is waited for, so
    what is wrong before it is an answer of its own. However the stream ends, also by a client that
    stops reading, its chunks are closed, which frees what they hold."""

    def __init__(self, first: Mapping[str, object], chunks: Chunks) -> None:
        self._chunks = chunks
        super().__init__(
            self._events(first), media_type="text/event-stream", headers=_STREAM_HEADERS
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""

        async def sending(message: Message) -> None:
            try:
                async with asyncio.timeout(SECONDS_TO_READ):
                    await send(message)
            except TimeoutError:
                raise _NotReadError from None

        try:
            await super().__call__(scope, receive, sending)
        except _NotReadError:
            logger.warning("a stream was not read for %d s; it is ended", SECONDS_TO_READ)
        finally:
            await self._chunks.aclose()

    async def _events(self, first: Mapping[str, object]) -> AsyncIterator[bytes]:
        yield _event(first)
        try:
            async for chunk in self._chunks:
                yield _event(chunk)
        except ApiError as error:
            yield _event(error.body)
        yield b"data: [DONE]\n\n"


class _NotReadError(Exception):
    """A client has stopped reading."""


def _event(value: Mapping[str, object]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


async def _unless_gone(http: HttpRequest, work: Coroutine[Any, Any, T]) -> T | Response:
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
