"""Symbolic texts, of which nothing is known except their origin.

A program that runs on them can concatenate them, call the string methods listed here, and ask
whether something holds. Each such question is recorded with its result for one conversation.
Another conversation with the same results is treated in the same way, because nothing else could be
known. A symbolic text is not a ``str`` and has no characters: anything else that reads it, in
Python or in C, is rejected or fails.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, cast

import jinja2

# Methods that no string fails for what is in it: they give a string, or yes or no.
CHANGES = {"capitalize", "lower", "lstrip", "removeprefix", "removesuffix", "replace", "rstrip"}
CHANGES |= {"strip", "swapcase", "title", "upper"}
QUESTIONS = {"endswith", "isalnum", "isalpha", "isdecimal", "isdigit", "islower", "isnumeric"}
QUESTIONS |= {"isspace", "isupper", "startswith"}


class UntraceableError(jinja2.TemplateError):
    """Something was done with a symbolic text that cannot be followed."""


@dataclass(frozen=True, slots=True)
class Made:
    """A value computed from a text, once the text is known."""

    function: Callable[..., object]
    of: Pieces
    arguments: tuple[object, ...] = ()

    def value(self, contents: Sequence[str]) -> object:
        """For these contents."""
        return self.function("".join(fill(self.of, contents)), *self.arguments)


Piece = str | int | Made  # as it is; the content of the message of that number; made of others
Pieces = Sequence[Piece]


def fill(pieces: Pieces, contents: Sequence[str]) -> list[str]:
    """The pieces of a text, for these contents."""
    return [piece if type(piece) is str else _filled(piece, contents) for piece in pieces]


def _filled(piece: Piece, contents: Sequence[str]) -> str:
    return contents[piece] if type(piece) is int else cast(str, cast(Made, piece).value(contents))


@dataclass
class SymbolicRun:
    """A run on symbolic texts that stand for these contents."""

    contents: Sequence[str]
    asked: list[tuple[Made, bool]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)  # what is written
    bounds: list[tuple[int, int]] = field(default_factory=list)  # of generation blocks, in pieces
    has_bounds: bool = True  # all generation blocks have theirs
    is_followed: bool = True  # nothing was refused, not even where the error is hidden

    def ask(self, question: Made) -> bool:
        """The result for these contents."""
        answer = bool(question.value(self.contents))
        self.asked.append((question, answer))
        return answer

    def make(self, function: Callable[..., object], of: Pieces, *arguments: object) -> OpaqueText:
        """A text computed from another; if that always fails, it fails now."""
        made = Made(function, of, arguments)
        made.value(self.contents)
        return OpaqueText(self, (made,))

    def refuse(self) -> NoReturn:
        """End the run."""
        self.is_followed = False
        raise UntraceableError


class Opaque:
    """Something that Python's own operators and functions reject."""

    __slots__ = ("_pieces", "_run")

    def __init__(self, run: SymbolicRun, pieces: Pieces) -> None:
        self._run, self._pieces = run, tuple(pieces)

    def _refused(self, *_: object) -> NoReturn:
        self._run.refuse()

    def __hash__(self) -> int:
        return self._refused()

    __str__ = __repr__ = __format__ = __bytes__ = _refused
    __len__ = __iter__ = __reversed__ = __lt__ = __le__ = __gt__ = __ge__ = _refused
    __index__ = __int__ = __float__ = _refused


class OpaqueText(Opaque):
    """A symbolic string."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return self._ask(bool)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str | Opaque) and self._ask(operator.eq, other)

    def __contains__(self, part: object) -> bool:
        return self._ask(operator.contains, part)

    __hash__ = Opaque.__hash__

    def __getitem__(self, index: object) -> NoReturn:
        """Strings have no named items; an item at a position is not known."""
        if type(index) is str:
            raise TypeError("a string has no named items")
        self._run.refuse()

    def __getattr__(self, name: str) -> Callable[..., object]:
        """A method of strings; an AttributeError if strings have no such method."""
        method = getattr(str, name)
        if name in QUESTIONS:
            return lambda *arguments: self._ask(method, *arguments)
        if name in CHANGES:
            return lambda *arguments: self._run.make(method, self._pieces, *self._plain(arguments))
        if name == "split":
            return lambda *arguments: SplitText(self._run, self._pieces, self._plain(arguments))
        return self._refused()

    def _ask(self, function: Callable[..., object], *arguments: object) -> bool:
        return self._run.ask(Made(function, self._pieces, self._plain(arguments)))

    def _plain(self, arguments: tuple[object, ...]) -> tuple[object, ...]:
        """The arguments, which must be known."""
        if any(type(argument) not in (str, int) for argument in arguments):
            self._run.refuse()
        return arguments


class SplitText(Opaque):
    """The parts of a symbolic string split by a separator: only the first and the last exist."""

    __slots__ = ("_arguments",)

    def __init__(self, run: SymbolicRun, pieces: Pieces, arguments: tuple[object, ...]) -> None:
        super().__init__(run, pieces)
        self._arguments = arguments

    def __getitem__(self, index: object) -> OpaqueText:
        if type(index) is not int or index not in (0, -1) or not self._arguments:
            self._run.refuse()
        return self._run.make(_part, self._pieces, index, *self._arguments)

    __hash__ = Opaque.__hash__
    __bool__ = __eq__ = __contains__ = __getattr__ = Opaque._refused


def _part(text: str, index: int, *arguments: object) -> str:
    split = cast(Callable[..., list[str]], text.split)
    return split(*arguments)[index]
