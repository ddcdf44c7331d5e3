"""TRL: a prompt with a completion, or with a chosen and a rejected one, as text or as messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....errors import DataError
from ...example import JSON, Example, Message
from ._picture_sources import with_pictures
from ._turns import Turns, with_system
from .fields import Row, as_text, from_json, label, mark_unread, missing, shown, text, tools

_TURNS = Turns(
    "role",
    "content",
    {
        "user": "user",
        "assistant": "assistant",
        "tool": "tool",
        "system": "system",
        "developer": "system",
    },
    "function_call",
)


@dataclass(frozen=True, kw_only=True)
class TRL:
    """``{"prompt", "completion"}`` or, with ``ranking``, ``{"prompt", "chosen", "rejected"}``: each
    a text or a list of messages; without a prompt, complete conversations with the same
    beginning."""

    main: ClassVar[str] = "prompt"

    prompt: str | None = "prompt"
    """The question, or the messages before the response."""
    completion: str | None = "completion"
    """The response, or the messages after the prompt."""
    system: str | None = "system"
    """The system message, if it is not the first message."""
    tools: str | None = "tools"
    """Functions the model may call: a list of schemas, or the same as a JSON string."""
    images: str | None = "images"
    """Pictures, in the order of their places in the prompt, or before the first question."""
    chosen: str | None = "chosen"
    """The chosen response, with ``ranking``: a text, or messages that end in it."""
    rejected: str | None = "rejected"
    """The rejected response, with ``ranking``, in the same form."""
    kto_tag: str | None = None
    """Whether the response is desirable, true or false."""
    ranking: bool = False
    """Each row has a chosen and a rejected response."""

    def read(self, row: Row) -> Example:
        """The row's conversation; raises DataError with the reason if it has none."""
        system, functions = text(row, self.system), tools(row, self.tools)
        prompt = self._messages(row, self.prompt, "user") or ()
        if not self.ranking:
            if not prompt:
                raise missing(row, self.prompt)
            messages = (*prompt, *(self._messages(row, self.completion, "assistant") or ()))
            messages = with_pictures(with_system(system, messages), row, self.images)
            return Example(messages, functions, label=label(row, self.kto_tag))
        (before, chosen), (other, rejected) = (
            self._answer(row, column, prompt) for column in (self.chosen, self.rejected)
        )
        if before != other:
            raise DataError(f"{self.chosen!r} and {self.rejected!r} answer different prompts")
        before = with_pictures(with_system(system, before), row, self.images)
        return Example(before, functions, chosen=chosen, rejected=rejected)

    def _answer(
        self, row: Row, column: str | None, prompt: tuple[Message, ...]
    ) -> tuple[tuple[Message, ...], Message]:
        """The messages before a response, and the response."""
        messages = self._messages(row, column, "assistant")
        if not messages:
            raise missing(row, column)
        *before, last = messages
        if last.role != "assistant":
            raise DataError(
                f"column {column!r}: expected a response, got a turn of the {last.role}"
            )
        if before and before[0].role != "assistant":  # a complete conversation ...
            if prompt and prompt[-1] not in before:  # ... which should repeat the prompt
                mark_unread(row, {str(self.prompt): prompt}, (), "the row")
            return tuple(before), last
        if not prompt:
            raise DataError(f"column {column!r}: a response without a prompt; {_PROMPT}")
        return (*prompt, *before), last

    def _messages(self, row: Row, column: str | None, role: str) -> tuple[Message, ...] | None:
        """The messages of a column; a text is one of ``role``. None if it is absent."""
        value = None if column is None else row.get(column)
        if value is None:
            return None
        where = f"column {column!r}"
        turns = [value] if isinstance(value, dict) else value
        if isinstance(value, str) and (turns := self._written(row, value, role)) is None:
            words = as_text(value, where)
            return (Message("user" if role == "user" else "assistant", words),)
        if not isinstance(turns, list):
            cure = f'; write it as text: "{value}"' if isinstance(value, int | float) else ""
            raise DataError(f"{where}: expected text or messages, got {shown(value)}{cure}")
        return tuple(
            _TURNS.message(turn, f"{where}: turn {i}", row) for i, turn in enumerate(turns, 1)
        )

    def _written(self, row: Row, value: str, role: str) -> list[JSON] | None:
        """The turns in a text. A response is some only if its prompt is written in the same way, or
        if it is a complete conversation with this prompt: else it is a response in JSON."""
        turns, prompt = _turns_in(value), row.get(self.prompt) if self.prompt else None
        if turns is None or role == "user":
            return turns
        if turns[0]["role"] == "assistant":
            is_part = _turns_in(prompt) is not None
        else:
            is_part = self.ranking and (
                prompt in (None, turns[0].get("content")) or _turns_in(prompt) is not None
            )
        return turns if is_part else None


def _turns_in(value: object) -> list[JSON] | None:
    """The turns that a text, of a CSV file say, is the JSON of: a list of nothing else. None of any
    other text, such as a response in JSON."""
    if not isinstance(value, str) or not value.lstrip().startswith('[{"'):
        return None
    try:
        turns = from_json(value, "")
    except DataError:
        return None
    return turns if isinstance(turns, list) and all(map(_is_turn, turns)) else None


def _is_turn(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.get("role") in (*_TURNS.roles, _TURNS.function)
        and ("content" in value or "tool_calls" in value)
    )


_PROMPT = "add a column 'prompt', or give both as complete lists of messages"
