"""Responses that must be JSON: the tokens that a grammar allows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from pydantic import Field, JsonValue

from ...errors import installation
from ...generate.live import Constraint
from ...generate.responses import Decode, OpenResponse
from .body import ApiError, Strict
from .models import ServedModel
from .prompts import ChatPrompt

if TYPE_CHECKING:  # an extra, and here only a name
    from llguidance import LLMatcher

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
    """Allows the tokens that continue a text of the grammar. A thought that the prompt has begun is
    free: the grammar begins after it."""

    matcher: LLMatcher
    decode: Decode
    awaited: str | None = None  # the end of the thought
    _ids: list[int] = field(default_factory=list)

    def apply(self, logits_V: torch.Tensor, row: OpenResponse) -> torch.Tensor:
        """The logits of allowed tokens; the others cannot follow."""
        if self.awaited is not None:
            return logits_V
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little").astype(bool))
        hidden_V = torch.ones(len(logits_V), dtype=torch.bool)
        count = min(len(allowed), len(logits_V))
        hidden_V[:count] = ~allowed[:count]
        return logits_V.masked_fill(hidden_V.to(logits_V.device), -torch.inf)

    def add(self, token: int) -> None:
        """Note the token that was chosen."""
        if self.awaited is None:
            self.matcher.consume_token(token)
            return
        self._ids = [*self._ids[1 - _TAIL :], token]
        if self.awaited in self.decode(self._ids):
            self.awaited = None


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
    return lambda: [GrammarConstraint(first.deep_copy(), model.exactly, awaited)]
