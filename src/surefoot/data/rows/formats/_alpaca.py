"""Alpaca: one question and one response per row, in columns of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....errors import DataError
from ...example import Example, Message
from ._picture_sources import with_pictures
from ._turns import with_system
from .fields import Row, as_text, label, missing, shown, structure, text, tools


@dataclass(frozen=True, kw_only=True)
class Alpaca:
    """``{"instruction", "input", "output", ...}``; a row with only a prompt is a plain text."""

    main: ClassVar[str] = "prompt"

    prompt: str | None = "instruction"
    """The question, or the text of a row for ``stage: pt``."""
    query: str | None = "input"
    """Further input to the question; follows it on a line of its own."""
    response: str | None = "output"
    """The response."""
    reasoning: str | None = "reasoning_content"
    """The thought before the response."""
    history: str | None = "history"
    """Earlier turns: a list of [question, answer]."""
    system: str | None = "system"
    """The system message."""
    tools: str | None = "tools"
    """Functions the model may call: a list of schemas, or the same as a JSON string."""
    images: str | None = "images"
    """Pictures, in the order of the marks ``<image>`` in the texts: paths, data URLs or bytes."""
    chosen: str | None = "chosen"
    """The chosen response, with ``ranking``."""
    rejected: str | None = "rejected"
    """The rejected response, with ``ranking``."""
    kto_tag: str | None = None
    """Whether the response is desirable, true or false."""
    ranking: bool = False
    """Each row has a chosen and a rejected response."""

    def read(self, row: Row) -> Example:
        """The row's conversation; raises DataError with the reason if it has none."""
        prompt, query = text(row, self.prompt), text(row, self.query)
        if prompt is None and query is None:
            raise missing(row, self.prompt)
        question = Message("user", "\n".join(part for part in (prompt, query) if part))
        before = with_system(text(row, self.system), (*self._history(row), question))
        before = with_pictures(before, row, self.images)
        functions = tools(row, self.tools)
        if self.ranking:
            chosen, rejected = (self._answer(row, name) for name in (self.chosen, self.rejected))
            return Example(before, functions, chosen=chosen, rejected=rejected)
        answer = text(row, self.response)
        if answer is not None:
            thought = text(row, self.reasoning) or ""
            messages = (*before, Message("assistant", answer, reasoning=thought))
            return Example(messages, functions, label=label(row, self.kto_tag))
        if self.response in row:  # a null: a question without its answer is no plain text
            return Example(before, functions, text="")
        if query or len(before) > 1:
            return Example(before, functions)
        if not prompt:
            raise DataError(f"column {self.prompt!r}: the text is empty")
        return Example(before, functions, text=prompt)

    def _answer(self, row: Row, column: str | None) -> Message:
        answer = text(row, column)
        if answer is None:
            raise missing(row, column)
        return Message("assistant", answer)

    def _history(self, row: Row) -> list[Message]:
        turns = structure(row, self.history)
        where = f"column {self.history!r}"
        messages = []
        for turn in turns if isinstance(turns, list) else []:
            if not isinstance(turn, list) or len(turn) != 2:
                raise DataError(f"{where}: expected [question, answer], got {shown(turn)}")
            messages.append(Message("user", as_text(turn[0], where)))
            messages.append(Message("assistant", as_text(turn[1], where)))
        if turns is not None and not isinstance(turns, list):
            raise DataError(f"{where}: expected a list of [question, answer], got {shown(turns)}")
        return messages
