"""Conversations of a shape that was met before are written without running the template.

A shape is the roles of a conversation, and the answers to what the template asks of its contents.
For each shape, one run on opaque texts gives the pieces it is written with (see ``opaque``); they
are used once they were seen to give, for one conversation, what the template gives. What cannot be
followed, and what is met for the first time, is rendered as ever.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import accumulate
from threading import Lock
from typing import Protocol

import jinja2

from .symbolic_render import Script
from .symbolic_text import Made, Pieces, Run, fill

Dicts = Sequence[Mapping[str, object]]
Spans = list[tuple[int, int]]


class Render(Protocol):
    """Runs the template as it is."""

    def __call__(self, messages: Dicts, *, prompt: bool, marks: bool) -> tuple[str, Spans]:
        """Text and bounds."""


LIMIT = 10_000  # shapes that are kept; some templates and conversations have any number
RAISED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class Mark(Enum):
    """Of a shape without pieces."""

    MET = 1  # once
    REFUSED = 2  # its pieces cannot be known


@dataclass(frozen=True, slots=True)
class Shape:
    """How all conversations of a shape are written."""

    pieces: Pieces
    bounds: Spans | None  # of the generation blocks, in pieces

    def text(self, contents: Sequence[str], *, marks: bool) -> tuple[str, Spans]:
        """The text, and with ``marks`` the generation blocks' bounds in it."""
        parts = fill(self.pieces, contents)
        if not marks or not self.bounds:
            return "".join(parts), []
        starts = [0, *accumulate(map(len, parts))]
        return "".join(parts), [(starts[a], starts[b]) for a, b in self.bounds]


@dataclass(frozen=True, slots=True)
class Fork:
    """A question of the template, and where each answer to it leads."""

    question: Made
    ways: dict[Hashable, Node] = field(default_factory=dict)


Node = Fork | Shape | Mark


class TracedTemplate:
    """A template, and the shapes of conversations that it was seen to write."""

    def __init__(self, source: str, names: Mapping[str, str], render: Render) -> None:
        """``names`` are those of special tokens; ``render`` runs the template as it is."""
        self._source, self._names, self._render = source, names, render
        self._ways: dict[Hashable, Node] = {}
        self._num_met = 0
        self._lock = Lock()  # of the script, which is for one thread at a time

    def render(self, messages: Dicts, *, prompt: bool, marks: bool) -> tuple[str, Spans]:
        """The text of a conversation of roles and contents; with ``marks``, the bounds in it of
        the generation blocks.

        Raises what ``render`` raises.
        """
        contents = [str(message["content"]) for message in messages]
        start: Hashable = (prompt, *[message["role"] for message in messages])
        ways, way, asked = self._ways, start, 0
        while isinstance(node := ways.get(way), Fork):
            ways, way, asked = node.ways, node.question.value(contents), asked + 1
        if isinstance(node, Shape) and (node.bounds is not None or not marks):
            return node.text(contents, marks=marks)
        if node is Mark.MET:
            ways[way] = Mark.REFUSED  # unless all goes well
            ways[way] = self._learnt(messages, contents, prompt, asked)
        elif node is None and self._num_met < LIMIT:
            ways[way] = Mark.MET
            self._num_met += 1
        return self._render(messages, prompt=prompt, marks=marks)

    def _learnt(self, messages: Dicts, contents: Sequence[str], prompt: bool, asked: int) -> Node:
        """What follows after so many questions, in conversations like this one."""
        run = self._followed(messages, contents, prompt)
        if run is None or not run.is_followed:
            return Mark.REFUSED
        shape = Shape(run.pieces, run.bounds if run.has_bounds else None)
        marks = bool(run.bounds)
        text, spans = self._render(messages, prompt=prompt, marks=marks)
        found, bounds = shape.text(contents, marks=marks)
        if found != text:
            return Mark.REFUSED
        node: Node = shape if bounds == spans else replace(shape, bounds=None)
        for question, answer in reversed(run.asked[asked:]):
            node = Fork(question, {answer: node})
        return node

    def _followed(self, messages: Dicts, contents: Sequence[str], prompt: bool) -> Run | None:
        """A run of the template on opaque texts; None if it fails."""
        roles = [str(message["role"]) for message in messages]
        extra = {"tools": None, "documents": None, "add_generation_prompt": prompt}
        try:
            with self._lock:
                return self._script.run(roles, contents, **extra, **self._names)
        except (jinja2.TemplateError, *RAISED):
            return None

    @cached_property
    def _script(self) -> Script:
        return Script(self._source)
