"""``/v1/chat/completions`` and ``/v1/completions``: their parameters, the rows of a request, and
what an answer says of every token."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar, Literal

from pydantic import Field, JsonValue, ValidationInfo, field_validator
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ...generate.live import Token
from ...generate.responses import HOLE, Decode, TextStream
from .body import WITHOUT_EFFECT, Prompts
from .engine import EngineThread
from .grammar import ResponseFormat, grammar_of
from .models import ServedModel
from .prompts import ChatPrompt, chat_prompt, each_prompt, plain_prompts
from .response_text import ResponseText
from .responses import Choice, ServedResponses
from .sampling import SamplingBody, rows_for

MAX_ALTERNATIVES = 20
_LEAST = -9999.0  # OpenAI's number for the log-probability of what is impossible
_USUAL = 16  # tokens of a completion, as OpenAI documents
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
ChatMessage = dict[str, JsonValue]


class ChatCompletionBody(SamplingBody):
    """A conversation, and how its next response is sampled."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=4096, fail_fast=True)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_ALTERNATIVES)
    tools: list[ChatMessage] | None = Field(default=None, max_length=512, fail_fast=True)
    tool_choice: Literal["none", "auto"] | None = None
    response_format: ResponseFormat | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(default=None, max_length=100)
    modalities: list[Literal["text"]] | None = Field(
        default=None, min_length=1, max_length=1, description=WITHOUT_EFFECT
    )
    chat_template_kwargs: dict[str, JsonValue] | None = Field(default=None, max_length=32)

    prompt_name: ClassVar[str] = "messages"

    @property
    def most_tokens(self) -> int | None:
        """Of a response; None: as many as the context has room for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def may_have_pictures(self) -> bool:
        """Whether a message has parts."""
        return any(not isinstance(turn.get("content"), str) for turn in self.messages)

    @property
    def num_alternatives(self) -> int | None:
        """Most probable tokens to report; None: no probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

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
    def _check_choice(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value == "auto" and not info.data.get("tools"):
            raise ValueError("it needs tools")
        return value


@dataclass(eq=False, kw_only=True)
class Chat(ServedResponses[ChatCompletionBody]):
    """One conversation, and what its responses have said so far."""

    prompt: ChatPrompt
    texts: list[ResponseText] = field(init=False)
    num_calls: list[int] = field(init=False)
    begun: set[int] = field(default_factory=set)  # rows with a token

    prefix, kind, kind_of_chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __post_init__(self) -> None:
        self.texts = [self.prompt.text(self.model) for _ in self.rows]
        self.num_calls = [0] * len(self.rows)

    @classmethod
    def prepared(cls, engine: EngineThread, model: ServedModel, body: ChatCompletionBody) -> Chat:
        """The next response to a conversation."""
        tools: Sequence[ChatMessage] = [] if body.tool_choice == "none" else body.tools or []
        arguments = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort:
            arguments["reasoning_effort"] = body.reasoning_effort
        prompt = chat_prompt(model, body.messages, tools, arguments)
        grammar = grammar_of(model, prompt, body.response_format)
        # marks of calls and of thoughts may be special tokens, and are read from the text
        reads_marks = bool(prompt.tools) or model.has_special_thoughts
        hides_special = body.skip_special_tokens and not reads_marks
        decode = model.plainly if hides_special else model.exactly
        rows = rows_for(engine, model, body, [prompt.ids], decode, grammar)
        return cls(model, body, [prompt.ids], rows, prompt=prompt)

    def more(self) -> dict[str, object]:
        """The prompt, for whoever trains on responses."""
        return {"prompt_token_ids": list(self.prompt.ids)} if self.body.return_token_ids else {}

    def first(self) -> list[Choice]:
        """Who speaks."""
        message = {"role": "assistant", "content": ""}
        return [_part(place, message) for place in range(len(self.rows))]

    def parts(self, place: int, token: Token) -> list[Choice]:
        """The pieces of text and the calls that are complete with a token."""
        is_last, choices = token.finish_reason is not None, list[Choice]()
        is_first = place not in self.begun
        self.begun.add(place)
        for piece in self.texts[place].push(token.text, is_last=is_last):
            if piece.call is None:
                choices.append(_part(place, {piece.kind: piece.text}))
            elif not self.num_calls[place] or self.body.parallel_tool_calls is not False:
                call = _called(self.num_calls[place], piece.call)
                choices.append(_part(place, {"tool_calls": [call]}))
                self.num_calls[place] += 1
        if not choices and (self.body.logprobs or self.body.return_token_ids):
            choices.append(_part(place, {}))
        if self.body.logprobs:
            alternatives = token.alternatives[: self.body.top_logprobs or 0]
            entry = _entry(self.model, token.id, token.logp, is_first=is_first)
            entry["top_logprobs"] = [
                _entry(self.model, *pair, is_first=is_first) for pair in alternatives
            ]
            choices[0]["logprobs"] = {"content": [entry]}
        if self.body.return_token_ids:
            choices[0]["token_ids"] = [token.id]
        if is_last:
            is_call = token.finish_reason == "stop" and self.num_calls[place]
            reason = "tool_calls" if is_call else _reason(token)
            choices.append(_part(place, {}) | {"finish_reason": reason})
        return choices

    def whole(self, place: int, joined: Choice) -> Choice:
        """The message."""
        delta = joined.pop("delta")
        calls = delta.pop("tool_calls", [])
        for call in calls:
            del call["index"]
        content = delta.pop("content", None if calls else "")
        message = {"role": "assistant", "content": content, **delta}
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


def _reason(token: Token) -> str | None:
    """Why a response ends with a token, as OpenAI names it."""
    return token.finish_reason and ("stop" if token.finish_reason == "stop" else "length")


def _entry(model: ServedModel, token_id: int, logp: float, *, is_first: bool) -> dict[str, object]:
    """What ``logprobs.content`` says of a token."""
    text = model.token_text(token_id, is_first=is_first)
    data = token_bytes(model.opened.tokenizer, token_id, text)
    return {"token": text, "logprob": max(logp, _LEAST), "bytes": list(data)}


class CompletionBody(SamplingBody):
    """Texts or lists of token ids, and how each is continued."""

    prompt: Prompts
    max_tokens: int | None = Field(default=None, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_ALTERNATIVES)
    return_tokens_as_token_ids: bool | None = None
    best_of: int | None = Field(default=None, ge=1)
    echo: Literal[False] | None = Field(default=None, description=WITHOUT_EFFECT)
    suffix: Literal[""] | None = Field(default=None, description=WITHOUT_EFFECT)

    prompt_name: ClassVar[str] = "prompt"

    @property
    def num_responses(self) -> int:
        """``n`` for each prompt."""
        return len(each_prompt(self.prompt)) * (self.n or 1)

    @property
    def most_tokens(self) -> int:
        """Of a response."""
        return self.max_tokens or _USUAL

    @property
    def num_alternatives(self) -> int | None:
        """Most probable tokens to report; None: no probabilities."""
        return self.logprobs

    @field_validator("best_of")
    @classmethod
    def _check_best(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value != (info.data.get("n") or 1):
            raise ValueError("expected the value of n; all responses are given")
        return value


@dataclass(eq=False, kw_only=True)
class Completion(ServedResponses[CompletionBody]):
    """One request, and where the texts of its responses have come to."""

    decode: Decode
    texts: dict[int, TextStream] = field(default_factory=dict)  # of rows that have begun
    offsets: dict[int, int] = field(default_factory=dict)  # of them, the characters so far

    prefix, kind, kind_of_chunk = "cmpl", "text_completion", "text_completion"

    @classmethod
    def prepared(cls, engine: EngineThread, model: ServedModel, body: CompletionBody) -> Completion:
        """Continue a text, or token ids."""
        prompts = plain_prompts(model, body.prompt)
        decode = model.plainly if body.skip_special_tokens else model.exactly
        rows = rows_for(engine, model, body, prompts, decode)
        return cls(model, body, prompts, rows, decode=decode)

    def first(self) -> list[Choice]:
        """A stream begins with the first token."""
        return []

    def parts(self, place: int, token: Token) -> list[Choice]:
        """A token, if it has text or is reported."""
        body, is_first = self.body, place not in self.offsets
        self.offsets.setdefault(place, 0)
        reports = body.logprobs is not None or body.return_token_ids
        if not (reports or token.text or token.finish_reason):
            return []
        choice: Choice = {"index": place, "text": token.text, "logprobs": None}
        choice["finish_reason"] = _reason(token)
        if body.logprobs is not None:
            names = self._named([token.id, *(i for i, _ in token.alternatives)], is_first)
            pairs = [*token.alternatives, (token.id, token.logp)]
            choice["logprobs"] = {
                "tokens": [names[token.id]],
                "token_logprobs": [max(token.logp, _LEAST)],
                "top_logprobs": [{names[i]: max(logp, _LEAST) for i, logp in pairs}],
                "text_offset": [self._offset(place, token.id, names[token.id])],
            }
        if body.return_token_ids:
            prompt = self.prompts[place // (body.n or 1)]
            choice["token_ids"] = [token.id]
            choice["prompt_token_ids"] = list(prompt) if is_first else None
        return [choice]

    def whole(self, place: int, joined: Choice) -> Choice:
        """All tokens."""
        return joined

    def _offset(self, place: int, token_id: int, name: str) -> int:
        """Where a token begins in the text; one that is a part of a character, where that does."""
        text = self.texts.setdefault(place, TextStream(self.decode)).push(token_id)
        before = self.offsets[place]
        self.offsets[place] += len(text)
        # text of incomplete characters before it may have been held back
        return self.offsets[place] - len(name) if text.endswith(name) else before

    def _named(self, ids: Sequence[int], is_first: bool) -> dict[int, str]:
        """Each token by its text, or, if that is no whole characters, by its bytes in OpenAI's
        form. A text that another one has is that of the first."""
        names = dict[int, str]()
        for token_id in ids:
            text = self.model.token_text(token_id, is_first=is_first)
            if HOLE in text:
                data = token_bytes(self.model.opened.tokenizer, token_id, text)
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            is_id = self.body.return_tokens_as_token_ids or text in names.values()
            names.setdefault(token_id, f"token_id:{token_id}" if is_id else text)
        return names


def token_bytes(tokenizer: PreTrainedTokenizerBase, token_id: int, text: str) -> bytes:
    """The bytes of a token, which need not be whole characters."""
    piece = str(tokenizer.convert_ids_to_tokens(token_id))
    if token_id in tokenizer.added_tokens_decoder:
        return piece.encode()
    if byte_token := _BYTE.fullmatch(piece):
        return bytes([int(byte_token[1], 16)])
    letters = _letters()
    if HOLE in text and all(letter in letters for letter in piece):
        return bytes(letters[letter] for letter in piece)
    return text.encode()


@cache
def _letters() -> Mapping[str, int]:
    """The bytes by the letters with which byte-level tokenizers write them."""
    return {letter: byte for byte, letter in bytes_to_unicode().items()}
