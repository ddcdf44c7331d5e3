"""Responses that must be JSON: the tokens that a grammar allows, up to its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field, JsonValue

from ...errors import installation
from ...generate.live import Constraint
from ...generate.responses import Decode, OpenResponse
from .body import ApiError, Strict
from .json_ending import DIGITS, LONGEST, Endings, JsonText, TokenPieces, allowed_by, ends
from .models import ServedModel
from .prompts import ChatPrompt

if TYPE_CHECKING:  # an extra, and here only a name
    from llguidance import LLMatcher, LLTokenizer

_TAIL = 32  # last tokens of a response in which the end of a thought is looked for
Grammar = Callable[[], Sequence[Constraint]]  # the constraints of one row
# llguidance allows any amount of white space by default, and a model that was not trained on JSON
# can write it until max_tokens. Here a separator has one space or none, as json.dumps writes it.
_SPACES = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class JsonSchema(Strict):
    """A schema that a response must follow."""

    name: str | None = Field(default=None, max_length=200)
    description: str | None = None
    schema_: dict[str, JsonValue] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form of a response."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


@dataclass(eq=False)
class GrammarConstraint:
    """Allows the tokens that continue a text of the grammar, and ends it in time. A thought that
    the prompt has begun is free: the grammar begins after it."""

    matcher: LLMatcher
    decode: Decode
    endings: Endings
    ending: list[int] | None  # the rest of the text, as short as is known
    awaited: str | None = None  # the end of the thought
    thought_end: list[int] = field(default_factory=list)  # its tokens that are still to come
    _is_closing: bool = False  # the thought
    _text: JsonText = JsonText()
    _ids: list[int] = field(default_factory=list)
    _pause: int = 0  # tokens before an ending is looked for again

    def apply(self, logits_V: torch.Tensor, row: OpenResponse) -> torch.Tensor:
        """The logits of allowed tokens; the others cannot follow."""
        if self.awaited is not None:
            return logits_V
        allowed = allowed_by(self.matcher)[: len(self.endings.pieces.all)]
        if self._text.digits:
            left = DIGITS[self._text.part] - self._text.digits
            fitting = allowed & (self.endings.pieces.num_digits[: len(allowed)] <= left)
            allowed = fitting if fitting.any() else allowed  # such as a long number that is wanted
        hidden_V = torch.ones(len(logits_V), dtype=torch.bool)
        count = min(len(allowed), len(logits_V))
        hidden_V[:count] = ~torch.from_numpy(allowed[:count])
        return logits_V.masked_fill(hidden_V.to(logits_V.device), -torch.inf)

    def settle(self, token: int, row: OpenResponse) -> int:
        """``token``, or, if no ending would fit behind it, the next one of the ending."""
        left = row.request.most - len(row.ids)
        if self.awaited is not None:
            has_room = left > len(self.thought_end) + len(self.ending or ())
            is_end = token in self.endings.pieces.tokenizer.eos_tokens  # with nothing in the form
            self._is_closing = self._is_closing or is_end or not has_room
            return self.thought_end.pop(0) if self._is_closing and self.thought_end else token
        rest = self._ending_after(token, left)
        if self.ending and (rest is None or len(rest) >= left):
            token, rest = self.ending[0], self.ending[1:]
        self.ending = rest
        return token

    def add(self, token: int) -> None:
        """Note the token that was chosen."""
        if self.awaited is None:
            self.matcher.consume_token(token)
            self._text = self._text.after(self.endings.pieces.all[token])
            return
        self._ids = [*self._ids[1 - _TAIL :], token]
        if self.awaited in self.decode(self._ids):
            self.awaited = None

    def _ending_after(self, token: int, left: int) -> list[int] | None:
        """Tokens that end the text after ``token``: mostly the same, or what is left of them."""
        before = self.ending or []
        if before[:1] == [token]:
            return before[1:]
        after = self.matcher.deep_copy()
        if not after.consume_token(token):
            return None
        for rest in (before[3:], before[2:], before[1:], before):
            if rest and ends(after, rest):
                return rest
        if self._pause:  # what was looked for in vain has cost as much as so many tokens
            self._pause -= 1
            return None
        text, limit = self._text.after(self.endings.pieces.all[token]), min(left, LONGEST)
        rest_of_text = self.endings.find(after, text, limit)
        self._pause = limit if rest_of_text is None else 0
        return rest_of_text


def grammar_of(model: ServedModel, prompt: ChatPrompt, form: ResponseFormat | None) -> Grammar:
    """What makes the constraints of each row that a request asks for. Raises ``ApiError``: the form
    cannot be followed."""
    if form is None or form.type == "text":
        return tuple
    schema: dict[str, Any] = {"type": "object"}
    if form.type == "json_schema":
        if form.json_schema is None:
            raise ApiError("response_format: json_schema has no schema", param="response_format")
        schema = form.json_schema.schema_
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise ApiError(
            f"response_format: this needs llguidance on the server: {installation('llguidance')}",
            param="response_format",
        ) from None
    grammar = f"start: %json {json.dumps({'x-guidance': _SPACES, **schema})}"
    try:
        first = LLMatcher(model.grammar_tokenizer, grammar, log_level=0)
    except ValueError as error:
        raise ApiError(f"this model's tokenizer supports no grammars: {error}") from None
    if first.is_error():
        reason = first.get_error().splitlines()[0]
        message = f"response_format: this cannot be followed: {reason}"
        raise ApiError(message, param="response_format")
    template = model.opened.template
    awaited = template.thoughts[1].strip() if template and prompt.is_thinking else None
    tokenizer = model.opened.tokenizer
    thought_end = tokenizer.encode(awaited, add_special_tokens=False) if awaited else []
    endings = Endings.of(_pieces(model.grammar_tokenizer), schema)
    ending = endings.find(first, JsonText(), LONGEST)

    def constraints() -> Sequence[Constraint]:
        matcher, last = first.deep_copy(), list(thought_end)
        return [GrammarConstraint(matcher, model.exactly, endings, ending, awaited, last)]

    return constraints


@lru_cache(maxsize=4)  # they are the same for all adapters of a base
def _pieces(tokenizer: LLTokenizer) -> TokenPieces:
    return TokenPieces(tokenizer)
