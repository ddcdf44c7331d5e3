"""``/v1/completions``: texts, or token ids, that are continued."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import Field
from starlette.responses import JSONResponse, Response

from ...generate.live import RowSettings, Token
from ...generate.requests import Request
from ..answers.echo import Echo, echoes_of
from ..answers.prompt_ids import num_prompts, prompts_of
from ..answers.token_report import completion_logprobs, usage_of
from ..body import Prompts, post, read
from ..errors import ApiError
from ..running.models import ServedModel
from ..sampling import Reported, SamplingBody, rows_for
from ..server_state import ServerState, unless_gone
from ..streaming import Chunks, stream_of

MAX_ALTERNATIVES = 20
_USUAL = 16  # tokens of a response, as OpenAI documents


class CompletionBody(SamplingBody):
    """Texts or lists of token ids, and how each is continued."""

    prompt: Prompts
    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_ALTERNATIVES)
    return_tokens_as_token_ids: bool | None = None
    best_of: int | None = Field(default=None, ge=1)
    echo: bool | None = None
    suffix: str | None = None


@dataclass(eq=False)
class Completion:
    """One request: its prompts and its rows. Without rows, prompts alone are returned."""

    model: ServedModel
    body: CompletionBody
    prompts: Sequence[Sequence[int]]
    rows: Sequence[tuple[Request, RowSettings]]
    echoes: Sequence[Echo] = ()  # of the prompts, if they are to be returned
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def head(self) -> dict[str, object]:
        """What every answer begins with."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model.name,
        }

    @property
    def num_choices(self) -> int:
        """Responses of all prompts."""
        return len(self.prompts) * (self.body.n or 1)

    def prompt(self, place: int) -> Sequence[int]:
        """The prompt of a row."""
        return self.prompts[place // (self.body.n or 1)]

    def echo(self, place: int) -> Echo | None:
        """What a row says of its prompt."""
        return self.echoes[place // (self.body.n or 1)] if self.echoes else None

    def choice(
        self, place: int, tokens: Sequence[Token], offset: int, *, is_first: bool
    ) -> tuple[dict[str, object], int]:
        """Some tokens of a response, and where the text after them begins. No tokens: the response
        has none."""
        body, echo = self.body, self.echo(place) if is_first else None
        last = tokens[-1].finish_reason if tokens else "length"
        found: dict[str, object] = {
            "index": place,
            "text": (echo.text if echo else "") + "".join(token.text for token in tokens),
            "logprobs": None,
            "finish_reason": {None: None, "stop": "stop"}.get(last, "length"),
        }
        if body.logprobs is not None:
            as_ids = bool(body.return_tokens_as_token_ids)
            offset = echo.end if echo else offset
            report, offset = completion_logprobs(self.model, tokens, offset, as_ids=as_ids)
            found["logprobs"] = echo.before(report) if echo else report
        if body.return_token_ids:
            found["token_ids"] = [token.id for token in tokens]
            found["prompt_token_ids"] = list(self.prompt(place)) if is_first else None
        return found, offset

    def usage(self, count: int) -> dict[str, int]:
        """With ``count`` tokens of responses."""
        return usage_of(sum(map(len, self.prompts)), count)


def routes(state: ServerState) -> APIRouter:
    """The address of completions."""
    router = APIRouter()
    post(router, "/v1/completions", CompletionBody, _create(state))
    return router


def _create(state: ServerState) -> Callable[..., object]:
    async def create(
        body: Annotated[CompletionBody, read(CompletionBody)], http: HttpRequest
    ) -> Response:
        """Continue a text, or token ids."""
        asked = await unless_gone(http, _prepared(state, body))
        if isinstance(asked, Response):
            return asked
        if body.stream:
            return await stream_of(_chunks(state, asked))
        return await unless_gone(http, _whole(state, asked))

    return create


async def _prepared(state: ServerState, body: CompletionBody) -> Completion:
    _refuse(body)
    state.check_room(num_prompts(body.prompt) * (body.n or 1))
    model = await state.models.get(body.model)
    prompts = await asyncio.to_thread(prompts_of, model, body.prompt, "prompt")
    decode = model.plainly if body.skip_special_tokens else model.exactly
    reported = Reported(body.logprobs, decode, "prompt")
    most = _USUAL if body.max_tokens is None else body.max_tokens
    rows = []
    if most:
        rows = await asyncio.to_thread(rows_for, state.engine, model, body, prompts, most, reported)
    echoes = await echoes_of(state, model, body, prompts, decode) if body.echo else []
    return Completion(model, body, prompts, rows, echoes)


def _refuse(body: CompletionBody) -> None:
    """Raise ``ApiError`` for what would change the answer and is not supported."""
    if body.max_tokens == 0 and not body.echo:
        raise ApiError("max_tokens: 0 needs echo, or nothing would be returned", param="max_tokens")
    if body.suffix:
        raise ApiError("suffix: a text is only continued; leave it unset", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError("best_of: expected the value of n; all responses are given", param="best_of")


async def _whole(state: ServerState, asked: Completion) -> Response:
    found: list[list[Token]] = [[] for _ in range(asked.num_choices)]
    async with state.answering(asked.model, asked.rows) as tokens:
        async for place, token in tokens:
            found[place].append(token)
    choices = [asked.choice(i, row, 0, is_first=True)[0] for i, row in enumerate(found)]
    answer = {**asked.head, "choices": choices, "usage": asked.usage(sum(map(len, found)))}
    return await asyncio.to_thread(JSONResponse, answer)


async def _chunks(state: ServerState, asked: Completion) -> Chunks:
    has_usage = asked.body.has_usage_in_stream
    rest: dict[str, object] = {"usage": None} if has_usage else {}
    is_silent = asked.body.logprobs is None and not asked.body.return_token_ids
    counts, offsets = [0] * asked.num_choices, [0] * asked.num_choices
    for place in range(0 if asked.rows else asked.num_choices):
        yield {**asked.head, "choices": [asked.choice(place, [], 0, is_first=True)[0]], **rest}
    async with state.answering(asked.model, asked.rows) as tokens:
        async for place, token in tokens:
            is_first, counts[place] = not counts[place], counts[place] + 1
            has_text = bool(token.text) or (is_first and asked.echo(place) is not None)
            if is_silent and not has_text and token.finish_reason is None:
                continue
            choice, offsets[place] = asked.choice(place, [token], offsets[place], is_first=is_first)
            yield {**asked.head, "choices": [choice], **rest}
    if has_usage:
        yield {**asked.head, "choices": [], "usage": asked.usage(sum(counts))}
