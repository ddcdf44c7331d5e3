"""What a model reads: the messages of a request as it saw them in training, or plain texts and
token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...data.example import JSON, Example, Message
from ...data.media.files import MAX_BYTES
from ...data.rows.formats import FORMATS
from ...data.rows.rows import Reading, parse_row, unread_keys
from ...data.text.templates import with_arguments
from ...errors import DataError, SurefootError
from ...storage import files
from .body import ApiError, Prompts
from .models import ServedModel
from .response_text import ResponseText

_FORM = FORMATS["openai"]()
# What clients of OpenAI send back with each message, and few chat templates show.
_WITHOUT_EFFECT = {"name", "tool_call_id", "id", "type", "index", "refusal", "annotations"}
_WITHOUT_EFFECT |= {"audio", "detail", "strict", "cache_control"}
_TAIL = 16  # last tokens of a prompt in which a thought may begin


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation up to its next response."""

    ids: Sequence[int]
    tools: Sequence[JSON]
    is_thinking: bool  # it has begun a thought

    def text(self, model: ServedModel) -> ResponseText:
        """What takes a response apart."""
        template = model.opened.template
        assert template is not None
        syntax = model.tool_syntax if self.tools else None
        return ResponseText(template.thoughts, self.is_thinking, syntax, self.tools)


def chat_prompt(
    model: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
) -> ChatPrompt:
    """The prompt of a conversation. ``arguments`` are the template's. Raises ``ApiError``."""
    template = model.opened.template
    if template is None:
        raise ApiError(
            f"the model {model.name!r} has no chat template; use /v1/completions", param="messages"
        )
    check_length(model, sum(map(_num_characters, messages)), "messages")
    example = _read(messages, tools)
    _refuse_unread(model, example)
    if example.tools and model.tool_syntax is None:
        raise ApiError(f"tools: the chat template of {model.name!r} writes no tools", param="tools")
    opened = model.opened
    try:
        if arguments:
            source = with_arguments(template.source, arguments, "of this model")
            opened = replace(opened, template=replace(template, source=source))
    except DataError:
        names = ", ".join(map(repr, arguments))
        raise ApiError(
            f"chat_template_kwargs: the chat template has no such argument ({names}), so it would "
            "change nothing; remove it",
            param="chat_template_kwargs",
        ) from None
    try:
        turns = _with_files(model, example.messages)
        ids, pictures = opened.codec.encode_with_pictures(turns, example.tools)
    except SurefootError as error:
        raise ApiError(f"messages: {error}", param="messages") from None
    prompt = opened.with_pictures(ids, pictures)
    begun = model.exactly(ids[-_TAIL:]).rstrip().endswith(template.thoughts[0].strip())
    return ChatPrompt(prompt, example.tools, begun)


def _with_files(model: ServedModel, messages: Sequence[Message]) -> list[Message]:
    """The messages with the bytes of their pictures. Nothing is fetched, and files are read in the
    folder of ``--media-folder`` alone. Raises ``ApiError``."""
    if model.lane.adapter is not None and any(message.media for message in messages):
        raise ApiError(
            f"messages: {model.name!r} shares its base with other adapters, and reads no pictures "
            "then; serve it by itself, or merged by `surefoot export`",
            param="messages",
        )

    def read(source: str | bytes | None) -> bytes:
        if source is None or isinstance(source, bytes):
            return source or b""
        name, folder = source[:200], model.media_folder
        if "://" in source:
            why = "it is a URL, and none is fetched; send a data URL (data:image/png;base64,...)"
        elif folder is None:
            why = "no file is read; send a data URL, or start the server with --media-folder FOLDER"
        else:
            try:
                return files.read_inside(folder, source, MAX_BYTES)
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                why = f"it is not read: {reason}; it must be a file inside --media-folder"
        raise ApiError(f"messages: picture {name}: {why}", param="messages")

    return [replace(message, media=tuple(map(read, message.media))) for message in messages]


def _num_characters(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return sum(len(text) for text in texts if isinstance(text, str))


def _read(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Example:
    """The conversation, as rows of datasets in OpenAI's format are read."""
    try:
        return parse_row(_FORM, {"messages": list(messages), "tools": list(tools) or None})
    except DataError as error:
        param = "tools" if "'tools'" in str(error) else "messages"
        raise ApiError(f"{param}: {error}", param=param) from None


def _refuse_unread(model: ServedModel, example: Example) -> None:
    """Raise ``ApiError`` if a message, a part or a call says what neither this server nor the chat
    template reads, such as DeepSeek's ``prefix``."""
    for key in unread_keys(example, _FORM, Reading(model.opened.codec.reads)):
        name = key.partition(" of ")[0]
        if name not in _WITHOUT_EFFECT:
            raise ApiError(
                f"messages: {key}: nothing reads it, and this server ignores none; remove it (a "
                "text that the response is to continue goes to /v1/completions)",
                param="messages",
                code="unknown_parameter",
            )


def each_prompt(prompts: Prompts) -> list[Any]:
    """The prompts of a request, of which one may come without a list around it."""
    is_one = isinstance(prompts, str) or (prompts and isinstance(prompts[0], int))
    return [prompts] if is_one else [*prompts]


def plain_prompts(model: ServedModel, prompts: Prompts) -> list[list[int]]:
    """The token ids of each prompt of a completion. Raises ``ApiError``: one is too long."""
    every = each_prompt(prompts)
    for text in filter(lambda prompt: isinstance(prompt, str), every):
        check_length(model, len(text), "prompt")
    return [_continued(model, p) if isinstance(p, str) else p for p in every] or [[]]


def _continued(model: ServedModel, text: str) -> list[int]:
    """The ids of a text. If it begins with the first token that the tokenizer adds, it has it
    once."""
    ids = model.opened.continuation(text)
    first = model.opened.tokenizer.bos_token_id
    return ids[1:] if first is not None and ids[:2] == [first, first] else ids


def room_for(model: ServedModel, prompt: Sequence[int], param: str) -> int:
    """Tokens that a prompt leaves for the response. Raises ``ApiError``: it is empty, leaves none,
    or has ids outside the vocabulary."""
    if not prompt:
        raise ApiError("the prompt is empty", param=param)
    if len(prompt) >= model.longest:
        raise _too_long(model, f"{len(prompt):,} tokens", param)
    model.check_ids([min(prompt), max(prompt)], param)
    return model.longest - len(prompt)


def check_length(model: ServedModel, num_characters: int, param: str) -> None:
    """Raise ``ApiError`` if the tokens of so many characters can only be too many: it takes
    seconds to compute those of some megabytes."""
    if num_characters > model.most_characters:
        raise _too_long(model, f"{num_characters:,} characters", param)


def _too_long(model: ServedModel, size: str, param: str) -> ApiError:
    """The error of a prompt that fills the context."""
    return ApiError(
        f"the prompt has {size}, and the context length is {model.longest:,} tokens, "
        "which leaves no room for a response; shorten the prompt",
        param=param,
        code="context_length_exceeded",
    )
