"""Responses that must be JSON or calls of tools: the tokens that a grammar allows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from ...data.example import JSON
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


class FunctionName(BaseModel):
    """The name of a function."""

    model_config = ConfigDict(extra="ignore")

    name: str


class FunctionChoice(Strict):
    """A function that must be called."""

    type: Literal["function"] = "function"
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | FunctionChoice


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


def grammar_of(
    model: ServedModel,
    prompt: ChatPrompt,
    form: ResponseFormat | None,
    choice: ToolChoice | None,
    *,
    several: bool,
) -> Grammar:
    """The constraints that a request makes. Raises ``ApiError``."""
    schema: dict[str, Any] | None = None
    if form is not None and form.type == "json_object":
        schema = {"type": "object"}
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise ApiError("response_format: json_schema has no schema", param="response_format")
        schema = form.json_schema.schema_
    forced = _forced(prompt.tools, choice)
    if forced and schema is not None:
        raise ApiError(
            "response_format and a forced tool_choice exclude each other", param="response_format"
        )
    template = model.opened.template
    awaited = template.thoughts[1].strip() if template and prompt.is_thinking else None
    if forced:
        grammar = call_grammar(model, forced, several=several)
        return _compiled(model, grammar, param="tool_choice", awaited=awaited)
    if schema is not None:
        return _compiled(model, f"start: {_json(schema)}", param="response_format", awaited=awaited)
    return tuple


def _forced(tools: Sequence[JSON], choice: ToolChoice | None) -> Sequence[JSON]:
    """The tools of which one must be called."""
    if choice is None or choice in ("none", "auto"):
        return ()
    if not isinstance(choice, FunctionChoice):
        return tools
    name = choice.function.name
    found = [tool for tool in tools if _function(tool).get("name") == name]
    if not found:
        raise ApiError(f"tool_choice: tools has no function {name!r}", param="tool_choice")
    return found


def _compiled(model: ServedModel, grammar: str, *, param: str, awaited: str | None) -> Grammar:
    """What makes the constraint of each row. Raises ``ApiError``: the grammar cannot be used."""
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise ApiError(
            f"{param}: this needs llguidance on the server: pip install 'surefoot[serve]'",
            param=param,
        ) from None
    try:
        first = LLMatcher(model.grammar_tokenizer, grammar, log_level=0)
    except ValueError as error:
        raise ApiError(f"this model's tokenizer supports no grammars: {error}") from None
    if first.is_error():
        said = first.get_error().splitlines()[0]
        raise ApiError(f"{param}: this cannot be followed: {said}", param=param)
    return lambda: [GrammarConstraint(first.deep_copy(), model.exactly, awaited)]


def call_grammar(model: ServedModel, tools: Sequence[JSON], *, several: bool) -> str:
    """The grammar of calls of ``tools``, in the syntax of the model's template. Raises
    ``ApiError``: there is none for this syntax."""
    syntax = model.tool_syntax or ""
    if syntax not in _CALLS:
        raise ApiError(
            f"tool_choice: calls cannot be forced in the syntax of this model's template "
            f"({syntax or 'none'}); use auto",
            param="tool_choice",
        )
    lines = _CALLS[syntax](model, [_function(tool) for tool in tools])
    return "\n".join(lines).replace("(again)", "+" if several else "")


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({'x-guidance': _SPACES, **schema})}"


def _function(tool: JSON) -> Mapping[str, Any]:
    found = tool.get("function", tool)
    assert isinstance(found, Mapping)
    return found


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return function.get("parameters") or {"type": "object"}


def _text(model: ServedModel, text: str) -> str:
    """A text in a grammar: the token, if the tokenizer has one for it."""
    number = model.opened.tokenizer.get_added_vocab().get(text)
    return json.dumps(text) if number is None else f"<[{number}]>"


def _object(function: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The schema of a call as an object."""
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, key: _parameters(function)},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _any(functions: Sequence[Mapping[str, Any]], key: str) -> str:
    return _json({"anyOf": [_object(function, key) for function in functions]})


Functions = Sequence[Mapping[str, Any]]


def _tagged(model: ServedModel, functions: Functions) -> list[str]:
    first, last = _text(model, "<tool_call>"), _text(model, "</tool_call>")
    return [
        "start: call(again)",
        f'call: {first} "\\n" object "\\n" {last} "\\n"?',
        f"object: {_any(functions, 'arguments')}",
    ]


def _llama3(_: ServedModel, functions: Functions) -> list[str]:
    return [f"start: {_any(functions, 'parameters')}"]


def _mistral(model: ServedModel, functions: Functions) -> list[str]:
    calls = {"anyOf": [_object(function, "arguments") for function in functions]}
    listed = {"type": "array", "items": calls, "minItems": 1}
    return [f"start: {_text(model, '[TOOL_CALLS]')} {_json(listed)}"]


def _actions(_: ServedModel, functions: Functions) -> list[str]:
    return ["start: call(again)", *_named(functions, '"Action: {}\\nAction Input: "', '"\\n"?')]


def _glm4(_: ServedModel, functions: Functions) -> list[str]:
    return ["start: call", *_named(functions, '"{}\\n"', "")]


def _named(functions: Functions, head: str, tail: str) -> list[str]:
    """A rule for each function: its name, and its arguments as JSON."""
    names = [f"call_{number}" for number in range(len(functions))]
    rules = [
        f"{name}: {head.format(json.dumps(function['name'])[1:-1])} arguments_{name} {tail}\n"
        f"arguments_{name}: {_json(_parameters(function))}"
        for name, function in zip(names, functions, strict=True)
    ]
    return [f"call: {' | '.join(names)}", *rules]


_CALLS: Mapping[str, Callable[[ServedModel, Functions], list[str]]] = {
    "default": _actions,
    "glm4": _glm4,
    "ling": _tagged,
    "llama3": _llama3,
    "mistral": _mistral,
    "phi4_mini": _actions,
    "qwen": _tagged,
}
