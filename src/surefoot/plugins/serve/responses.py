"""Answers to a request, as a stream of chunks or in one piece: then the chunks are put together."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ...generate.live import RowSettings, Token
from ...generate.requests import Request
from .body import post
from .models import ServedModel
from .sampling import SamplingBody
from .server_state import ServerState, unless_gone
from .streaming import Chunks, stream_of

Choice = dict[str, Any]  # one response of an answer, or a part of one
B = TypeVar("B", bound=SamplingBody)


@dataclass(eq=False)
class ServedResponses(ABC, Generic[B]):
    """A request that is ready to be answered: its model, its rows, and the prompts of these."""

    model: ServedModel
    body: B
    prompts: Sequence[Sequence[int]]
    rows: Sequence[tuple[Request, RowSettings]]
    created: int = field(default_factory=lambda: int(time.time()))

    prefix: ClassVar[str]
    kind: ClassVar[str]
    kind_of_chunk: ClassVar[str]

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
        found = {**self.head(self.kind), "choices": choices, "usage": self.usage(count)}
        return await asyncio.to_thread(JSONResponse, {**found, **self.more()})


def _join(known: Choice, part: Choice) -> None:
    """Add a part: texts and lists follow those before, all else stays as it came first."""
    for name, value in part.items():
        if isinstance(value, dict):
            known[name] = known.get(name) or {}
            _join(known[name], value)
        elif known.get(name) is None:
            known[name] = list(value) if isinstance(value, list) else value
        elif isinstance(value, str | list):
            known[name] += value


def answer_at(
    router: APIRouter,
    path: str,
    kind: type[B],
    state: ServerState,
    prepared: Callable[[ServerState, B], Awaitable[ServedResponses[B]]],
) -> None:
    """Answer requests to ``path``, whose bodies are of a ``kind``."""

    async def answer(body: B, http: HttpRequest) -> Response:
        responses = await prepared(state, body)
        if body.stream:
            return await stream_of(responses.chunks(state))
        return await unless_gone(http, responses.answer(state))

    answer.__doc__ = prepared.__doc__
    post(router, path, kind, answer)
