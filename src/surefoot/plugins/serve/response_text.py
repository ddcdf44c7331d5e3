"""The text of a response, taken apart as it comes: its thought, what it says, its tool calls.

A stream and an answer in one piece go through the same code, so they say the same. What may
become a mark of a thought or of a call is held back until it is known. A call is given when it is
complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...data.example import JSON
from ...data.text.templates.render import Words
from ...data.text.tool_calls import SYNTAXES, parse_tool_calls

Kind = Literal["reasoning_content", "content"]
_WHITE = " \t\r\n"


@dataclass(frozen=True)
class TextPiece:
    """Some text, or a tool call."""

    kind: Kind = "content"
    text: str = ""
    call: JSON | None = None


@dataclass
class ResponseText:
    """Feed pieces of a response's text."""

    words: Words  # around a thought
    is_thinking: bool = False  # the prompt has begun a thought
    syntax: str | None = None  # of tool calls; None: there are none to be read
    tools: Sequence[JSON] = ()
    _text: str = ""  # that is not given yet
    _state: Literal["start", "thinking", "gap", "answer", "call"] = field(default="start")
    _has_said: bool = False

    def __post_init__(self) -> None:
        if self.is_thinking:
            self._state = "thinking"

    def push(self, text: str, *, is_last: bool = False) -> list[TextPiece]:
        """What is known now."""
        self._text += text
        pieces: list[TextPiece] = []
        while True:
            before = self._state
            pieces += getattr(self, f"_{before}")(is_last)
            if self._state == before:
                return [piece for piece in pieces if piece.text or piece.call is not None]

    def _start(self, is_last: bool) -> list[TextPiece]:
        """Whether the response begins with a thought."""
        first, seen = self.words[0].strip(), self._text.lstrip()
        if seen.startswith(first):
            self._text, self._state = seen[len(first) :], "thinking"
        elif is_last or not first.startswith(seen):
            self._state = "answer"
        return []

    def _thinking(self, is_last: bool) -> list[TextPiece]:
        """The thought, up to its last word."""
        last = self.words[1].strip()
        if not self._has_said:
            self._text = self._text.lstrip()
        thought, ended, rest = self._text.partition(last)
        if ended:
            self._text, self._state, self._has_said = rest, "gap", False
            return [TextPiece("reasoning_content", thought.rstrip())]
        return self._shown("reasoning_content", (last,), is_last=is_last)

    def _gap(self, is_last: bool) -> list[TextPiece]:
        """The space between a thought and the answer."""
        self._text = self._text.lstrip()
        if self._text or is_last:
            self._state = "answer"
        return []

    def _answer(self, is_last: bool) -> list[TextPiece]:
        """What it says, up to a call."""
        if self.syntax is None:
            text, self._text = self._text, ""
            return [TextPiece("content", text)]
        openings = SYNTAXES[self.syntax].openings
        if SYNTAXES[self.syntax].is_at_start:
            return self._answer_or_call(openings, is_last)
        places = [at for opening in openings if (at := self._text.find(opening)) >= 0]
        if not places:
            return self._shown("content", openings, is_last=is_last)
        answer = self._text[: min(places)].rstrip()
        self._text, self._state = self._text[len(answer) :], "call"
        return [TextPiece("content", answer)]

    def _answer_or_call(self, openings: Sequence[str], is_last: bool) -> list[TextPiece]:
        """The answer in a syntax in which all of it is a call, or none."""
        seen = self._text.lstrip()
        if self._has_said or (seen and not any(map(seen.startswith, openings))):
            is_prefix = any(opening.startswith(seen) for opening in openings)
            if self._has_said or is_last or not is_prefix:
                text, self._text, self._has_said = self._text, "", True
                return [TextPiece("content", text)]
        elif seen:
            self._state = "call"
        return []

    def _call(self, is_last: bool) -> list[TextPiece]:
        """The calls, once the response has ended; what cannot be read is text."""
        if not is_last:
            return []
        text, self._text = self._text, ""
        parsed = parse_tool_calls(text, self.syntax, self.tools)
        content = "\n".join(filter(None, [parsed.text, *parsed.broken])) if parsed.calls else text
        return [TextPiece("content", content), *(TextPiece(call=call) for call in parsed.calls)]

    def _shown(self, kind: Kind, marks: Sequence[str], *, is_last: bool) -> list[TextPiece]:
        """The text, without an end that may be the beginning of a mark, and space before it."""
        end = len(self._text)
        if not is_last:
            end -= _num_held(self._text, marks)
            end = len(self._text[:end].rstrip(_WHITE))
        text, self._text = self._text[:end], self._text[end:]
        self._has_said = self._has_said or bool(text)
        return [TextPiece(kind, text.rstrip() if is_last and kind != "content" else text)]


def _num_held(text: str, marks: Sequence[str]) -> int:
    sizes = (n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n]))
    return max(sizes, default=0)
