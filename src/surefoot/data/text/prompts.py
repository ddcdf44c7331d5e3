"""A file of prompts: one per line of a text file, one object per line of a JSON Lines file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import DataError
from ..example import JSON, Message
from ..rows.formats.fields import as_text, shown, tools
from ..rows.formats.openai import OpenAI
from ..rows.json_rows import text_lines

_ROWS = (".jsonl", ".ndjson")
_ANSWER = ("answer", "finish_reason")  # what is written beside a prompt
_CONVERSATIONS = OpenAI()


@dataclass(frozen=True)
class Prompt:
    """A conversation that ends in a user turn."""

    origin: str  # "prompts.jsonl: line 3"
    messages: tuple[Message, ...]
    tools: tuple[JSON, ...] = ()
    row: Mapping[str, object] = field(default_factory=dict)  # what stands in the file

    def with_system(self, text: str | None) -> Prompt:
        """The same with a system message in front, if it has none of its own."""
        if not text or self.messages[0].role == "system":
            return self
        messages = (Message("system", text), *self.messages)
        return Prompt(self.origin, messages, self.tools, self.row)


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file, in order. Blank lines are ignored.

    A line of a ``.jsonl`` file is an object with ``prompt``, a text, or ``messages``, in OpenAI's
    form, which end in a user turn; its other fields are kept. A line of any other file is a prompt
    as it is.

    Raises ``DataError``: the file is missing or contains no prompt, or a line is invalid.
    """
    try:
        found = list(_prompts(path))
    except OSError as error:
        raise DataError(f"{path}: prompts cannot be read: {error.strerror}") from None
    if not found:
        raise DataError(f"{path}: contains no prompt; expected one per line")
    return found


def _prompts(path: Path) -> Iterator[Prompt]:
    read = _of_row if path.suffix in _ROWS else _of_text
    for number, line in text_lines(path):
        origin = f"{path}: line {number}"
        try:
            yield read(line, origin)
        except (DataError, ValueError, RecursionError) as error:
            raise DataError(f"{origin}: {error}") from None


def _of_text(line: str, origin: str) -> Prompt:
    if "\0" in line:
        raise DataError("a NUL character, so this is not a text file; expected one prompt per line")
    return Prompt(origin, (Message("user", line),), row={"prompt": line})


def _of_row(line: str, origin: str) -> Prompt:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise DataError(f"expected an object, got {shown(row)}")
    if taken := [name for name in _ANSWER if name in row]:
        raise DataError(f"the key {taken[0]!r} is used for the response; give it another name")
    if ("prompt" in row) == ("messages" in row):
        keys = ", ".join(row) or "none"
        raise DataError(f"expected one of the keys 'prompt' and 'messages' (keys found: {keys})")
    return Prompt(origin, _messages(row), tools(row, "tools"), row)


def _messages(row: Mapping[str, object]) -> tuple[Message, ...]:
    if "prompt" in row:
        text = as_text(row["prompt"], "'prompt'")
        if not text.strip():
            raise DataError("the prompt is empty")
        return (Message("user", text),)
    messages = _CONVERSATIONS.read(row).messages
    if messages[-1].role not in ("user", "tool"):
        raise DataError(f"the last message is of the {messages[-1].role}; expected the user")
    return messages
