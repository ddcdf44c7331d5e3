"""Fast rendering: conversations whose structure is already known are rendered without Jinja.

A structure is the roles of a conversation, and the results of the template's questions about its
contents. For each structure, one run on symbolic texts gives the pieces of its rendering (see
``symbolic_text``). They are used only after they gave the same text as the template for one
conversation. Everything else is rendered by the template.
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

from ....example import Dicts, Spans
from .symbolic_render import Script
from .symbolic_text import Made, Pieces, SymbolicRun, fill


class Render(Protocol):
    """Runs the template as it is."""

    def __call__(self, messages: Dicts, *, prompt: bool, marks: bool) -> tuple[str, Spans]:
        """Text, and the bounds of generation blocks in it."""


LIMIT = 10_000  # shapes that are kept; some templates and conversations have any number
RAISED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class Mark(Enum):
    """The branch for a structure without known pieces."""

    MET = 1  # once
    REFUSED = 2  # its pieces cannot be known


@dataclass(frozen=True, slots=True)
class Shape:
    """The rendering of all conversations of one structure."""

    pieces: Pieces
    bounds: Spans | None  # of the generation blocks, in pieces

    def text(self, contents: Sequence[str], *, marks: bool) -> tuple[str, Spans]:
        """The text, and with ``marks`` the bounds of the generation blocks in it."""
        parts = fill(self.pieces, contents)
        if not marks or not self.bounds:
            return "".join(parts), []
        starts = [0, *accumulate(map(len, parts))]
        return "".join(parts), [(starts[a], starts[b]) for a, b in self.bounds]


@dataclass(frozen=True, slots=True)
class Fork:
    """A question of the template about contents, and the branch for each result."""

    question: Made
    ways: dict[Hashable, Node] = field(default_factory=dict)


Node = Fork | Shape | Mark


class TracedTemplate:
    """A template, and the structures of conversations that it has rendered."""

    def __init__(self, source: str, names: Mapping[str, str], render: Render) -> None:
        """``names`` are those of special tokens; ``render`` runs the template."""
        self._source, self._names, self._render = source, names, render
        self._ways: dict[Hashable, Node] = {}
        self._num_met = 0
        self._lock = Lock()  # of the script, which is for one thread at a time

    def render(self, messages: Dicts, *, prompt: bool, marks: bool) -> tuple[str, Spans]:
        """The text of a conversation; with ``marks``, also the bounds of its generation blocks.
        Raises what ``render`` raises."""
        contents = [str(message["content"]) for message in messages]
        start: Hashable = (prompt, *[message["role"] for message in messages])
        ways, way, asked = self._ways, start, 0
        while isinstance(node := ways.get(way), Fork):
            ways, way, asked = node.ways, node.question.value(contents), asked + 1
        if isinstance(node, Shape) and (node.bounds is not None or not marks):
            return node.text(contents, marks=marks)
        if node is Mark.MET:
            ways[way] = Mark.REFUSED  # unless all goes well
            ways[way] = self._new_branch(messages, contents, prompt, asked)
        elif node is None and self._num_met < LIMIT:
            ways[way] = Mark.MET
            self._num_met += 1
        return self._render(messages, prompt=prompt, marks=marks)

    def _new_branch(
        self, messages: Dicts, contents: Sequence[str], prompt: bool, asked: int
    ) -> Node:
        """The branch after the questions so far, for conversations like this one."""
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

    def _followed(
        self, messages: Dicts, contents: Sequence[str], prompt: bool
    ) -> SymbolicRun | None:
        """A run of the template on symbolic texts; None if it fails."""
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


def fast_renderer(source: str, names: Mapping[str, str], render: Render) -> Render:
    """``render`` of the template ``source``, faster for conversations of known structure."""
    return TracedTemplate(source, names, render).render
