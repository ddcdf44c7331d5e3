"""``/v1/chat/completions``."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field, JsonValue, ValidationInfo, field_validator

from ...generate.live import Token
from .body import WITHOUT_EFFECT
from .grammar import ResponseFormat, ToolChoice, grammar_of
from .prompts import ChatPrompt, chat_prompt
from .response_text import ResponseText
from .responses import Choice, ServedResponses
from .sampling import Reported, SamplingBody, rows_for
from .server_state import ServerState
from .token_report import chat_entry

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


@dataclass(eq=False, kw_only=True)
class Chat(ServedResponses[ChatCompletionBody]):
    """One conversation, and what its responses have said so far."""

    prompt: ChatPrompt
    texts: list[ResponseText] = field(init=False)
    num_calls: list[int] = field(init=False)

    prefix, kind, kind_of_chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __post_init__(self) -> None:
        is_forced = self.body.tool_choice not in (None, "none", "auto")
        self.texts = [self.prompt.text(self.model, is_forced=is_forced) for _ in self.rows]
        self.num_calls = [0] * len(self.rows)

    def more(self) -> dict[str, object]:
        """The prompt, for whoever trains on responses."""
        return {"prompt_token_ids": list(self.prompt.ids)} if self.body.return_token_ids else {}

    def first(self) -> list[Choice]:
        """Who speaks."""
        message = {"role": "assistant", "content": ""}
        return [_part(place, message) for place in range(len(self.rows))]

    def parts(self, place: int, token: Token) -> list[Choice]:
        """The pieces of text and the calls that are complete with a token."""
        is_last, found = token.finish_reason is not None, list[Choice]()
        for piece in self.texts[place].push(token.text, is_last=is_last):
            if piece.call is None:
                found.append(_part(place, {piece.kind: piece.text}))
            elif not self.num_calls[place] or self.body.parallel_tool_calls is not False:
                call = _called(self.num_calls[place], piece.call)
                found.append(_part(place, {"tool_calls": [call]}))
                self.num_calls[place] += 1
        if not found and (self.body.logprobs or self.body.return_token_ids):
            found.append(_part(place, {}))
        if self.body.logprobs:
            entry = chat_entry(self.model, token, self.body.top_logprobs or 0)
            found[0]["logprobs"] = {"content": [entry]}
        if self.body.return_token_ids:
            found[0]["token_ids"] = [token.id]
        if is_last:
            is_call = token.finish_reason == "stop" and self.num_calls[place]
            reason = "stop" if token.finish_reason == "stop" else "length"
            found.append(_part(place, {}) | {"finish_reason": "tool_calls" if is_call else reason})
        return found

    def whole(self, place: int, joined: Choice) -> Choice:
        """The message."""
        said = joined.pop("delta")
        calls = said.pop("tool_calls", [])
        for call in calls:
            del call["index"]
        content = said.pop("content", None if calls or self.texts[place].is_forced else "")
        message = {"role": "assistant", "content": content, **said}
        return {**joined, "message": {**message, "tool_calls": calls} if calls else message}


def _part(place: int, delta: Mapping[str, object]) -> Choice:
    return {"index": place, "delta": delta, "logprobs": None, "finish_reason": None}


def _called(number: int, call: Mapping[str, object]) -> dict[str, object]:
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    return {
        "index": number,
        "id": secrets.token_hex(5)[:9],  # as long as Mistral's templates demand
        "type": "function",
        "function": {"name": call["name"], "arguments": arguments},
    }


async def prepared(state: ServerState, body: ChatCompletionBody) -> Chat:
    """The next response to a conversation."""
    state.check_room(body.n or 1)
    model = await state.models.get(body.model)
    offered: Sequence[Message] = [] if body.tool_choice == "none" else body.tools or []
    effort = {"reasoning_effort": body.reasoning_effort} if body.reasoning_effort else {}
    arguments = {**(body.chat_template_kwargs or {}), **effort}
    prompt = await asyncio.to_thread(chat_prompt, model, body.messages, offered, arguments)
    several = body.parallel_tool_calls is not False
    grammar = await asyncio.to_thread(
        grammar_of, model, prompt, body.response_format, body.tool_choice, several=several
    )
    reads_marks = bool(prompt.tools) or model.has_special_thoughts
    is_exact = reads_marks or not body.skip_special_tokens
    decode = model.exactly if is_exact else model.plainly
    alternatives = (body.top_logprobs or 0) if body.logprobs else None
    reported = Reported(alternatives, decode, "messages", grammar)
    most = body.max_completion_tokens or body.max_tokens
    rows = await asyncio.to_thread(
        rows_for, state.engine, model, body, [prompt.ids], most, reported
    )
    return Chat(model, body, [prompt.ids], rows, prompt=prompt)
