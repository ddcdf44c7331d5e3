"""A recipe as it was written: plain data, and the position of each part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import RecipeError
from ..schema import Keys, Problem

Mark = tuple[int, int]  # line and column, from 1


@dataclass(frozen=True)
class Document:
    """Plain data with the position of every key; ``overrides`` have precedence over ``marks``."""

    data: object
    name: str = ""
    marks: Mapping[Keys, Mark] = field(default_factory=dict)
    overrides: Mapping[Keys, str] = field(default_factory=dict)  # path -> the argument it came from
    overridden: frozenset[Keys] = frozenset()  # the settings whose values come from overrides

    def error(self, problems: Sequence[Problem]) -> RecipeError:
        """All ``problems`` in reading order, each with its position."""
        placed = sorted(problems, key=lambda problem: self._mark(problem.path) or (0, 0))
        return RecipeError("\n".join(f"{self._place(p.path)}{p}" for p in placed))

    def _place(self, path: Keys) -> str:
        covering = [way for way in self.overrides if path[: len(way)] == way]
        inside = [way for way in self.overrides if path and way[: len(path)] == path]
        if covering or inside:
            return f"{self.overrides[max(covering, key=len) if covering else inside[-1]]}: "
        mark = self._mark(path)
        if mark is None:
            return f"{self.name}: " if self.name else ""
        return f"{self.name}:{mark[0]}:{mark[1]} "

    def _mark(self, path: Keys) -> Mark | None:
        """The position of ``path``, or of the nearest part of the recipe."""
        ways = (path[:length] for length in range(len(path), -1, -1))
        return next((self.marks[way] for way in ways if way in self.marks), None)
