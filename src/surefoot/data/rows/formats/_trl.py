"""TRL: a prompt with a completion, or with a chosen and a rejected one, as text or as messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....errors import DataError
from ...example import Example, Message
from ._turns import Turns, with_pictures, with_system
from .fields import Row, as_text, from_json, label, missing, shown, text, tools

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
        if before and before[0].role != "assistant":
            return tuple(before), last  # a complete conversation; it repeats the prompt
        if not prompt:
            raise DataError(f"column {column!r}: a response without a prompt; {_PROMPT}")
        return (*prompt, *before), last

    def _messages(self, row: Row, column: str | None, role: str) -> tuple[Message, ...] | None:
        """The messages of a column; a text is one of ``role``. None if it is absent."""
        value = None if column is None else row.get(column)
        if value is None:
            return None
        where = f"column {column!r}"
        if isinstance(value, str) and not value.lstrip().startswith('[{"'):
            words = as_text(value, where)
            return (Message("user" if role == "user" else "assistant", words),)
        value = from_json(value, where) if isinstance(value, str) else value
        turns = [value] if isinstance(value, dict) else value
        if not isinstance(turns, list):
            cure = f'; write it as text: "{value}"' if isinstance(value, int | float) else ""
            raise DataError(f"{where}: expected text or messages, got {shown(value)}{cure}")
        return tuple(_TURNS.message(turn, f"{where}: turn {i}") for i, turn in enumerate(turns, 1))


_PROMPT = "add a column 'prompt', or give both as complete lists of messages"
