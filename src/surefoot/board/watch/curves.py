"""Curves of characters: dots of Braille, eight in a character, or one mark in each.

A curve is drawn in pixels; of several curves in one character the last one gives the color.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column
_BLANK = 0x2800
MARKS = "*+ox#@%&"  # of each curve, where there is no Unicode
Pixel = tuple[int, int]


@dataclass(frozen=True)
class Curve:
    """A curve: steps, and values of which None is not finite."""

    steps: Sequence[float]
    values: Sequence[float | None]

    @property
    def finite(self) -> list[tuple[float, float]]:
        """The points that can be drawn."""
        pairs = zip(self.steps, self.values, strict=True)
        return [(step, value) for step, value in pairs if value is not None]


@dataclass(frozen=True)
class Picture:
    """Rows of characters, each with the number of the curve that it is of, or None."""

    rows: list[list[tuple[str, int | None]]]
    low: float
    high: float
    first: float
    last: float


def picture(curves: Sequence[Curve], width: int, height: int, *, is_plain: bool) -> Picture | None:
    """Curves in ``width`` by ``height`` characters; None if nothing is finite."""
    points = [curve.finite for curve in curves]
    steps = [step for curve in points for step, _ in curve]
    values = [value for curve in points for _, value in curve]
    if not values:
        return None
    low, high, first, last = min(values), max(values), min(steps), max(steps)
    across, down = (1, 1) if is_plain else (2, 4)
    cells: dict[Pixel, tuple[int, int]] = {}
    for number, curve in enumerate(points):
        placed = [
            (
                round(_part(step, first, last) * (width * across - 1)),
                round((1 - _part(value, low, high)) * (height * down - 1)),
            )
            for step, value in curve
        ]
        for x, y in _line(placed):
            at = x // across, y // down
            dots = cells.get(at, (0, number))[0] | _DOTS[y % down][x % across]
            cells[at] = dots, number
    rows = [[_character(cells.get((x, y)), is_plain) for x in range(width)] for y in range(height)]
    return Picture(rows, low, high, first, last)


def _part(value: float, low: float, high: float) -> float:
    """Where a value is between two others, from 0 to 1; in the middle if they are the same."""
    span = high - low
    if span == 0:
        return 0.5
    return (
        (value - low) / span
        if math.isfinite(span)
        else (value / 2 - low / 2) / (high / 2 - low / 2)
    )


def _character(cell: tuple[int, int] | None, is_plain: bool) -> tuple[str, int | None]:
    if cell is None:
        return " ", None
    dots, number = cell
    return MARKS[number % len(MARKS)] if is_plain else chr(_BLANK + dots), number


def _line(points: Sequence[Pixel]) -> Iterator[Pixel]:
    """The pixels of a curve, neighbors joined; the longer way is walked in steps of one."""
    for (x, y), (to_x, to_y) in pairwise(points):
        length = max(abs(to_x - x), abs(to_y - y))
        for part in range(length):
            yield x + round((to_x - x) * part / length), y + round((to_y - y) * part / length)
    yield from points[-1:]
