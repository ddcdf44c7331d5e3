"""``/v1/chat/completions``."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import Field, JsonValue, ValidationInfo, field_validator
from starlette.responses import JSONResponse, Response

from ...generate.live import RowSettings, Token
from ...generate.requests import Request
from ..answers.conversations import ChatPrompt, prompt_of
from ..answers.forced import ResponseFormat, ToolChoice, grammar_of
from ..answers.response_text import ResponseText, TextPiece
from ..answers.token_report import chat_entry, usage_of
from ..body import WITHOUT_EFFECT, post, read
from ..running.models import ServedModel
from ..sampling import Reported, SamplingBody, rows_for
from ..server_state import ServerState, unless_gone
from ..streaming import Chunks, stream_of

MAX_ALTERNATIVES = 20
Message = dict[str, JsonValue]


class ChatCompletionBody(SamplingBody):
    """A conversation, and how its next response is sampled."""

    messages: list[Message] = Field(min_length=1, max_length=4096, fail_fast=True)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_ALTERNATIVES)
    tools: list[Message] | None = Field(default=None, max_length=512, fail_fast=True)
    tool_choice: ToolChoice | None = None
    response_format: ResponseFormat | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(default=None, max_length=100)
    modalities: list[Literal["text"]] | None = Field(
        default=None, min_length=1, max_length=1, description=WITHOUT_EFFECT
    )
    chat_template_kwargs: dict[str, JsonValue] | None = Field(default=None, max_length=32)

    @field_validator("max_completion_tokens")
    @classmethod
    def _check_most(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("max_tokens") is not None:
            raise ValueError("it and max_tokens exclude each other; send one of them")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _check_alternatives(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and not info.data.get("logprobs"):
            raise ValueError("it needs logprobs: true")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _check_choice(cls, value: ToolChoice | None, info: ValidationInfo) -> ToolChoice | None:
        if value not in (None, "none") and not info.data.get("tools"):
            raise ValueError("it needs tools")
        return value

    @property
    def most(self) -> int | None:
        """Tokens of a response."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def arguments(self) -> dict[str, JsonValue]:
        """Those of the template."""
        effort = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}
        return {**(self.chat_template_kwargs or {}), **effort}

    @property
    def offered(self) -> Sequence[Message]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []


@dataclass(eq=False)
class Chat:
    """One request: its prompt, its rows, and the names of what is answered."""

    model: ServedModel
    body: ChatCompletionBody
    prompt: ChatPrompt
    rows: Sequence[tuple[Request, RowSettings]]
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> dict[str, object]:
        """What every answer begins with."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
        }

    def choices(self) -> list[ChatChoice]:
        """The responses, without tokens yet."""
        is_forced = self.body.tool_choice not in (None, "none", "auto")
        return [
            ChatChoice(self, place, self.prompt.text(self.model, is_forced=is_forced))
            for place in range(len(self.rows))
        ]


@dataclass(eq=False)
class ChatChoice:
    """One response as it comes."""

    chat: Chat
    index: int
    text: ResponseText
    ids: list[int] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)
    calls: list[dict[str, object]] = field(default_factory=list)
    entries: list[dict[str, object]] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, token: Token) -> list[TextPiece]:
        """Take in a token; the pieces that are complete with it."""
        self.ids.append(token.id)
        body = self.chat.body
        if body.logprobs:
            count = body.top_logprobs or 0
            self.entries.append(chat_entry(self.chat.model, token, count))
        is_last = token.finish_reason is not None
        found = self.text.push(token.text, is_last=is_last)
        kept = [piece for piece in found if piece.call is None or self._add_call(piece.call)]
        for piece in kept:
            self.said[piece.kind] = self.said.get(piece.kind, "") + piece.text
        if is_last:
            is_stopped = token.finish_reason == "stop"
            self.finish_reason = (
                ("tool_calls" if self.calls else "stop") if is_stopped else "length"
            )
        return kept

    def _add_call(self, call: Mapping[str, object]) -> bool:
        """Whether the call is given: without ``parallel_tool_calls``, it is one alone."""
        if self.calls and self.chat.body.parallel_tool_calls is False:
            return False
        arguments = json.dumps(call["arguments"], ensure_ascii=False)
        self.calls.append(
            {
                "id": secrets.token_hex(5)[:9],  # as long as Mistral's templates demand
                "type": "function",
                "function": {"name": call["name"], "arguments": arguments},
            }
        )
        return True

    @property
    def message(self) -> dict[str, object]:
        """The complete message."""
        content = self.said.get("content", "")
        found: dict[str, object] = {
            "role": "assistant",
            "content": content or (None if self.calls or self.text.is_forced else ""),
        }
        if "reasoning_content" in self.said:
            found["reasoning_content"] = self.said["reasoning_content"]
        return {**found, "tool_calls": self.calls} if self.calls else found

    @property
    def whole(self) -> dict[str, object]:
        """The complete choice."""
        found: dict[str, object] = {
            "index": self.index,
            "message": self.message,
            "logprobs": {"content": self.entries} if self.chat.body.logprobs else None,
            "finish_reason": self.finish_reason,
        }
        return {**found, "token_ids": self.ids} if self.chat.body.return_token_ids else found

    def chunk(
        self, delta: Mapping[str, object], finish_reason: str | None = None
    ) -> dict[str, object]:
        """A piece of the choice."""
        return {
            "index": self.index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish_reason,
        }

    def chunks(self, token: Token) -> list[dict[str, object]]:
        """The pieces that a token adds."""
        before = len(self.calls)
        pieces = [piece for piece in self.add(token) if piece.call is None]
        found = [self.chunk({piece.kind: piece.text}) for piece in pieces]
        for number, call in enumerate(self.calls[before:], before):
            found.append(self.chunk({"tool_calls": [{"index": number, **call}]}))
        body = self.chat.body
        if (body.logprobs or body.return_token_ids) and not found:
            found.append(self.chunk({}))
        if body.logprobs:
            found[0]["logprobs"] = {"content": self.entries[-1:]}
        if body.return_token_ids:
            found[0]["token_ids"] = [token.id]
        if self.finish_reason is not None:
            found.append(self.chunk({}, self.finish_reason))
        return found


def routes(state: ServerState) -> APIRouter:
    """The address of conversations."""
    router = APIRouter()
    post(router, "/v1/chat/completions", ChatCompletionBody, _create(state))
    return router


def _create(state: ServerState) -> Callable[..., object]:
    async def create(
        body: Annotated[ChatCompletionBody, read(ChatCompletionBody)], http: HttpRequest
    ) -> Response:
        """The next response to a conversation."""
        chat = await prepared(state, body)
        if body.stream:
            return await stream_of(_chunks(state, chat))
        return await unless_gone(http, _whole(state, chat))

    return create


async def prepared(state: ServerState, body: ChatCompletionBody) -> Chat:
    """The request, ready to be answered. Raises ``ApiError``."""
    state.check_room(body.n or 1)
    model = await state.models.get(body.model)
    prompt = await asyncio.to_thread(prompt_of, model, body.messages, body.offered, body.arguments)
    several = body.parallel_tool_calls is not False
    grammar = await asyncio.to_thread(
        grammar_of, model, prompt, body.response_format, body.tool_choice, several=several
    )
    reads_marks = bool(prompt.tools) or model.has_special_thoughts
    is_exact = reads_marks or not body.skip_special_tokens
    reported = Reported(
        (body.top_logprobs or 0) if body.logprobs else None,
        model.exactly if is_exact else model.plainly,
        "messages",
        grammar,
    )
    rows = await asyncio.to_thread(
        rows_for, state.engine, model, body, [prompt.ids], body.most, reported
    )
    return Chat(model, body, prompt, rows)


async def _whole(state: ServerState, chat: Chat) -> Response:
    """The answer in one piece."""
    choices = chat.choices()
    async with state.answering(chat.model, chat.rows) as tokens:
        async for place, token in tokens:
            choices[place].add(token)
    found: dict[str, Any] = {
        **chat.head("chat.completion"),
        "choices": [choice.whole for choice in choices],
        "usage": _usage(chat, choices),
    }
    if chat.body.return_token_ids:
        found["prompt_token_ids"] = list(chat.prompt.ids)
    return await asyncio.to_thread(JSONResponse, found)


async def _chunks(state: ServerState, chat: Chat) -> Chunks:
    """The answer piece by piece."""
    choices, head = chat.choices(), chat.head("chat.completion.chunk")
    has_usage = chat.body.has_usage_in_stream
    rest: dict[str, object] = {"usage": None} if has_usage else {}
    async with state.answering(chat.model, chat.rows) as tokens:
        for choice in choices:
            first = choice.chunk({"role": "assistant", "content": ""})
            ids = {"prompt_token_ids": list(chat.prompt.ids)} if chat.body.return_token_ids else {}
            yield {**head, "choices": [first], **ids, **rest}
        async for place, token in tokens:
            for chunk in choices[place].chunks(token):
                yield {**head, "choices": [chunk], **rest}
    if has_usage:
        yield {**head, "choices": [], "usage": _usage(chat, choices)}


def _usage(chat: Chat, choices: Sequence[ChatChoice]) -> dict[str, int]:
    return usage_of(len(chat.prompt.ids), sum(len(choice.ids) for choice in choices))
