"""``response_format`` and ``tool_choice``: what a response must be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from ...data.example import JSON
from ..errors import ApiError
from ..running.models import ServedModel
from .conversations import ChatPrompt
from .grammar import FREE, Grammar, call_grammar, compiled, json_grammar


class JsonSchema(BaseModel):
    """A schema that a response must follow."""

    model_config = ConfigDict(extra="forbid")

    name: str | None = Field(default=None, max_length=200)
    description: str | None = None
    schema_: dict[str, JsonValue] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The form of a response."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class FunctionName(BaseModel):
    """The name of a function."""

    model_config = ConfigDict(extra="ignore")

    name: str


class FunctionChoice(BaseModel):
    """A function that must be called."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"] = "function"
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | FunctionChoice


def grammar_of(
    model: ServedModel,
    prompt: ChatPrompt,
    form: ResponseFormat | None,
    choice: ToolChoice | None,
    *,
    several: bool,
) -> Grammar:
    """The constraints that a request makes. Raises ``ApiError``."""
    schema = _schema(form)
    forced = _forced(prompt.tools, choice)
    if not forced and schema is None:
        return FREE
    if forced and schema is not None:
        raise ApiError(
            "response_format and a forced tool_choice exclude each other", param="response_format"
        )
    template = model.opened.template
    awaited = template.thoughts[1].strip() if template and prompt.is_thinking else None
    if forced:
        text, param = call_grammar(model, forced, several=several), "tool_choice"
    else:
        text, param = json_grammar(schema or {}), "response_format"
    return compiled(model, text, param=param, awaited=awaited)


def _schema(form: ResponseFormat | None) -> dict[str, Any] | None:
    """The schema of a response; None if it is free."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
    if form.json_schema is None:
        raise ApiError("response_format: json_schema has no schema", param="response_format")
    return form.json_schema.schema_


def _forced(tools: Sequence[JSON], choice: ToolChoice | None) -> Sequence[JSON]:
    """The tools of which one must be called."""
    if choice is None or choice in ("none", "auto"):
        return ()
    if not isinstance(choice, FunctionChoice):
        return tools
    found = [tool for tool in tools if _name(tool) == choice.function.name]
    if not found:
        name = choice.function.name
        raise ApiError(f"tool_choice: tools has no function {name!r}", param="tool_choice")
    return found


def _name(tool: JSON) -> object:
    function = tool.get("function", tool)
    return function.get("name") if isinstance(function, dict) else None
