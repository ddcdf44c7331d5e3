"""``/v1/responses``: one response to items. Nothing is stored between two requests."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import BaseModel, ConfigDict, Field, JsonValue
from starlette.responses import JSONResponse, Response

from ...generate.live import Token
from ..answers.response_items import Event, OutputItems, messages_of
from ..body import FIRST, Body, checked, post, read
from ..errors import ApiError
from ..server_state import ServerState, unless_gone
from ..streaming import Chunks, stream_of
from .chat import Chat, ChatChoice, ChatCompletionBody, prepared


class TextFormBody(BaseModel):
    """The form of a response."""

    model_config = ConfigDict(extra="forbid")

    format: dict[str, JsonValue] | None = None


class ReasoningBody(BaseModel):
    """How much a model thinks, where its template has such an argument."""

    model_config = ConfigDict(extra="forbid")

    effort: str | None = None


class ResponsesBody(Body):
    """What a response is made of."""

    input: str | Annotated[list[dict[str, JsonValue]], FIRST]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    tools: list[dict[str, JsonValue]] | None = Field(default=None, max_length=512)
    tool_choice: str | dict[str, JsonValue] | None = None
    parallel_tool_calls: bool | None = None
    text: TextFormBody | None = None
    reasoning: ReasoningBody | None = None
    stream: bool | None = None
    truncation: Literal["disabled"] | None = None
    previous_response_id: None = None
    background: Literal[False] | None = None
    include: list[str] | None = Field(default=None, max_length=0)

    def as_chat(self) -> ChatCompletionBody:
        """The same as a conversation. Raises ``ApiError``."""
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        given: dict[str, Any] = {
            "model": self.model,
            "messages": [*first, *messages_of(self.input)],
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "tools": [_nested(tool) for tool in self.tools] if self.tools else None,
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": _form(self.text),
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
        }
        return checked(ChatCompletionBody, given)


@dataclass(eq=False)
class ResponseAnswer:
    """A response as it comes."""

    body: ResponsesBody
    chat: Chat
    choice: ChatChoice
    items: OutputItems = field(default_factory=OutputItems)
    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def add(self, token: Token) -> Iterator[Event]:
        """The events that a token causes."""
        for piece in self.choice.add(token):
            yield from self.items.add(piece)
        if token.finish_reason is not None:
            is_cut = self.choice.finish_reason == "length"
            yield from self.items.close("incomplete" if is_cut else "completed")

    def object(self, status: str) -> dict[str, object]:
        """The response so far."""
        is_cut = status == "incomplete"
        counts = len(self.chat.prompt.ids), len(self.choice.ids)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": self.body.instructions,
            "max_output_tokens": self.body.max_output_tokens,
            "model": self.chat.model.name,
            "output": list(self.items.done),
            "parallel_tool_calls": self.body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": self.body.temperature,
            "text": {"format": (self.body.text and self.body.text.format) or {"type": "text"}},
            "tool_choice": self.body.tool_choice or "auto",
            "tools": self.body.tools or [],
            "top_p": self.body.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else _usage(*counts),
            "metadata": self.body.metadata or {},
        }

    @property
    def status(self) -> str:
        """Of a response that has ended."""
        return "incomplete" if self.choice.finish_reason == "length" else "completed"


def routes(state: ServerState) -> APIRouter:
    """The address of responses."""
    router = APIRouter()
    post(router, "/v1/responses", ResponsesBody, _create(state))
    return router


def _create(state: ServerState) -> Callable[..., object]:
    async def create(
        body: Annotated[ResponsesBody, read(ResponsesBody)], http: HttpRequest
    ) -> Response:
        """A response to a text, or to items."""
        chat = await prepared(state, await asyncio.to_thread(body.as_chat))
        answer = ResponseAnswer(body, chat, chat.choices()[0])
        if body.stream:
            return await stream_of(_numbered(state, answer), has_names=True)
        return await unless_gone(http, _whole(state, answer))

    return create


async def _whole(state: ServerState, answer: ResponseAnswer) -> Response:
    async with state.answering(answer.chat.model, answer.chat.rows) as tokens:
        async for _, token in tokens:
            for _event in answer.add(token):
                pass
    return await asyncio.to_thread(JSONResponse, answer.object(answer.status))


async def _numbered(state: ServerState, answer: ResponseAnswer) -> Chunks:
    number = 0
    events = _events(state, answer)
    try:
        async for event in events:
            yield {**event, "sequence_number": number}
            number += 1
    finally:
        await events.aclose()


async def _events(state: ServerState, answer: ResponseAnswer) -> Chunks:
    async with state.answering(answer.chat.model, answer.chat.rows) as tokens:
        for name in ("created", "in_progress"):
            yield {"type": f"response.{name}", "response": answer.object("in_progress")}
        async for _, token in tokens:
            for event in answer.add(token):
                yield event
    status = answer.status
    yield {"type": f"response.{status}", "response": answer.object(status)}


def _nested(tool: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """A tool in the form of chat completions."""
    if tool.get("type") != "function":
        raise ApiError("tools: only functions are supported", param="tools")
    inner: dict[str, JsonValue] = {
        key: value for key, value in tool.items() if key not in ("type", "strict")
    }
    return {"type": "function", "function": inner}


def _choice(given: str | dict[str, JsonValue] | None) -> JsonValue:
    if not isinstance(given, dict):
        return given
    return {"type": given.get("type"), "function": {"name": given.get("name")}}


def _form(text: TextFormBody | None) -> JsonValue:
    """``response_format`` of chat completions."""
    form = text.format if text is not None else None
    if form is None or form.get("type") != "json_schema":
        return form
    inner: JsonValue = {key: value for key, value in form.items() if key != "type"}
    return {"type": "json_schema", "json_schema": inner}


def _usage(num_input: int, num_output: int) -> dict[str, object]:
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_input + num_output,
    }
