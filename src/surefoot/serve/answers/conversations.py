"""Messages of a request to token ids, as the model saw them in training."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...data.example import JSON, Example
from ...data.rows.formats.openai import OpenAI
from ...data.text.codec import Codec
from ...data.text.templates.arguments import with_arguments
from ...errors import DataError, SurefootError
from ...use.model_loading import LoadedModel
from ..errors import ApiError
from ..running.models import ServedModel
from .prompt_ids import check_length
from .response_text import ResponseText

_MOST = 8  # templates with arguments that are kept
_TAIL = 16  # last tokens of a prompt in which a thought may begin


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation up to its next response."""

    ids: Sequence[int]
    tools: Sequence[JSON]
    is_thinking: bool  # it has begun a thought

    def text(self, model: ServedModel, *, is_forced: bool) -> ResponseText:
        """What takes a response apart; ``is_forced``: it must be calls."""
        template = model.opened.template
        assert template is not None
        syntax = model.tool_syntax if self.tools else None
        return ResponseText(template.thoughts, self.is_thinking, syntax, self.tools, is_forced)


def prompt_of(
    model: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
) -> ChatPrompt:
    """The prompt of a conversation. ``arguments`` are the template's. Raises ``ApiError``."""
    opened = model.opened
    if opened.template is None:
        raise ApiError(
            f"the model {model.name!r} has no chat template; use /v1/completions", param="messages"
        )
    texts = (text for one in messages for text in _texts(one.get("content")))
    check_length(model, sum(map(len, texts)), "messages")
    example = _read(messages, tools)
    if example.tools and model.tool_syntax is None:
        raise ApiError(f"tools: the chat template of {model.name!r} writes no tools", param="tools")
    try:
        ids = _codec(model, arguments).encode_prompt(example.messages, example.tools)
    except SurefootError as error:
        raise ApiError(f"messages: {error}", param="messages") from None
    first = opened.template.thoughts[0].strip()
    begun = model.exactly(ids[-_TAIL:]).rstrip().endswith(first)
    return ChatPrompt(ids, example.tools, begun)


def _texts(content: object) -> list[str]:
    parts = content if isinstance(content, list) else [content]
    found = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return [text for text in found if isinstance(text, str)]


def _read(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Example:
    """The conversation, as rows of datasets in OpenAI's format are read."""
    try:
        return OpenAI().read({"messages": list(messages), "tools": list(tools) or None})
    except DataError as error:
        said = str(error)
        param = "tools" if "'tools'" in said else "messages"
        raise ApiError(f"{param}: {said}", param=param) from None


def _codec(model: ServedModel, arguments: Mapping[str, Any]) -> Codec:
    """The codec of a template with arguments."""
    if not arguments:
        return model.opened.codec
    key = json.dumps(arguments, sort_keys=True)
    kept: OrderedDict[str, Codec] = vars(model).setdefault("_codecs", OrderedDict())
    if key not in kept:
        kept[key] = _with_arguments(model.opened, arguments).codec
    kept.move_to_end(key)
    while len(kept) > _MOST:
        kept.popitem(last=False)
    return kept[key]


def _with_arguments(opened: LoadedModel, arguments: Mapping[str, Any]) -> LoadedModel:
    assert opened.template is not None
    try:
        source = with_arguments(opened.template.source, arguments, "of this model")
    except DataError:
        known = ", ".join(map(repr, arguments))
        raise ApiError(
            f"chat_template_kwargs: the chat template has no such argument ({known}), so it would "
            "change nothing; remove it",
            param="chat_template_kwargs",
        ) from None
    return replace(opened, template=replace(opened.template, source=source))
