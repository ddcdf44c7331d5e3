"""Server-sent events. A client that stops reading loses its stream, and what it holds is freed."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from .errors import ApiError

logger = logging.getLogger(__name__)
SECONDS_TO_READ = 60  # for which a client may read nothing
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
Chunks = AsyncGenerator[Mapping[str, object], None]
DONE = b"data: [DONE]\n\n"


def event(value: Mapping[str, object]) -> bytes:
    """One event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


class _NotReadError(Exception):
    """A client has stopped reading."""


class EventStream(StreamingResponse):
    """Chunks as events; however it ends, their generator is closed."""

    def __init__(self, first: Mapping[str, object], chunks: Chunks) -> None:
        events = _events(first, chunks)
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS)
        self._chunks = chunks

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


async def stream_of(chunks: Chunks) -> EventStream:
    """Chunks as events, ended by OpenAI's last line. What is wrong before the first one is an
    answer of its own: raises ``ApiError``."""
    return EventStream(await anext(chunks), chunks)


async def _events(first: Mapping[str, object], chunks: Chunks) -> AsyncIterator[bytes]:
    yield event(first)
    try:
        async for chunk in chunks:
            yield event(chunk)
    except ApiError as error:
        yield event(error.body)
    yield DONE
