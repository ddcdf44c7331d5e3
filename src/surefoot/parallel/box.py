"""Boxes: rectangular parts of tensors, as integers. No torch here.

A numpy slice as text, ``0, :, -3:, 0:100:10``, is parsed to the box of a tensor that it needs. New
axes, masks and negative steps are not supported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from ..errors import CheckpointError, counted


@dataclass(frozen=True, order=True, slots=True)
class Box:
    """The half-open box ``[start, start + shape)`` inside a tensor. A scalar is ``Box((), ())``."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.shape):
            raise ValueError(f"start {self.start} and shape {self.shape} differ in length")
        if any(n < 0 for n in self.start + self.shape):
            raise ValueError(f"start {self.start} and shape {self.shape} must not be negative")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """The box that contains all of a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the last index, per dimension."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def __and__(self, other: Box) -> Box | None:
        """The intersection; None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def __contains__(self, other: Box) -> bool:
        """Whether all of ``other`` is inside this box."""
        bounds = zip(self.start, self.stop, other.start, other.stop, strict=True)
        return all(a <= c and d <= b for a, b, c, d in bounds)

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """The index of this box in a tensor that contains ``outer``."""
        starts = (a - o for a, o in zip(self.start, outer.start, strict=True))
        return tuple(slice(a, a + n) for a, n in zip(starts, self.shape, strict=True))

    def moved_into(self, outer: Box) -> Box:
        """This box relative to the start of ``outer``."""
        start = tuple(a - o for a, o in zip(self.start, outer.start, strict=True))
        return Box(start, self.shape)

    def blocks(self, limit: int) -> Iterator[Box]:
        """Split into boxes of at most ``limit`` elements, each contiguous, in row-major order."""
        if self.size <= limit or not self.shape:
            yield self
            return
        row = self.size // self.shape[0]
        step = max(1, limit // row)
        for first in range(0, self.shape[0], step):
            rows = min(step, self.shape[0] - first)
            block = Box((self.start[0] + first, *self.start[1:]), (rows, *self.shape[1:]))
            if rows > 1 or row <= limit or len(self.shape) == 1:
                yield block
            else:
                inner = Box(self.start[1:], self.shape[1:])
                for part in inner.blocks(limit):
                    yield Box((block.start[0], *part.start), (1, *part.shape))

    def runs_in(self, outer: Box) -> Iterator[tuple[int, int]]:
        """The position of this box in the row-major elements of ``outer``: ranges of (first
        element, count).

        The ranges are in order; concatenated, they are this box in row-major order. Trailing
        dimensions that the box fills are folded, so that a box of complete rows is one range.
        """
        if not self.size:
            return
        fold = len(self.shape)
        while fold and self.shape[fold - 1] == outer.shape[fold - 1]:
            fold -= 1
        fold = max(fold - 1, 0)  # the last dimension that is cut still gives contiguous elements
        strides = [prod(outer.shape[d + 1 :]) for d in range(len(outer.shape))]
        inside = [a - o for a, o in zip(self.start, outer.start, strict=True)]
        length = prod(self.shape[fold:])
        first = sum(a * s for a, s in zip(inside[fold:], strides[fold:], strict=True))
        for index in product(
            *(range(a, a + n) for a, n in zip(inside[:fold], self.shape[:fold], strict=True))
        ):
            yield first + sum(i * s for i, s in zip(index, strides[:fold], strict=True)), length


MAX_CUT_DIMS = 8  # along which the boxes of one tensor may be cut


def is_covered_once(whole: Box, boxes: Sequence[Box]) -> bool:
    """Whether ``boxes`` cover every element of ``whole`` exactly once, and no other.

    The mixed differences of an indicator function are its corners with alternating signs, and they
    determine it. So the boxes sum to the indicator of ``whole`` exactly if their signed corners do.
    The cost is linear in the number of boxes. More than 8 sharded dimensions are rejected.
    """
    if any(len(box.shape) != len(whole.shape) or box not in whole for box in boxes):
        return False
    if not whole.size:
        return len(boxes) == 1
    if not all(box.size for box in boxes):
        return False
    cut = [
        d
        for d in range(len(whole.shape))
        if any((b.start[d], b.shape[d]) != (whole.start[d], whole.shape[d]) for b in boxes)
    ]
    if len(cut) > MAX_CUT_DIMS or not boxes:
        return False
    corners: dict[tuple[int, ...], int] = {}
    for sign, box in [(-1, whole), *((1, box) for box in boxes)]:
        for ends in product(*(((box.start[d], 1), (box.stop[d], -1)) for d in cut)):
            at = tuple(end for end, _ in ends)
            corners[at] = corners.get(at, 0) + sign * prod(side for _, side in ends)
    return not any(corners.values())


_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_HELP = "expected for example '0:8', '-1', '0, :, 3' or '..., ::10'"


@dataclass(frozen=True)
class Selection:
    """The box to read, then the step along each dimension, and the dimensions to drop."""

    box: Box
    steps: tuple[int, ...]
    dropped: tuple[bool, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        kept = zip(self.counts, self.dropped, strict=True)
        return tuple(count for count, is_dropped in kept if not is_dropped)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of values along each dimension of the tensor."""
        return tuple(-(-n // step) for n, step in zip(self.box.shape, self.steps, strict=True))

    def index(self) -> tuple[int | slice, ...]:
        """How to index the tensor that was read for ``box``."""
        pairs = zip(self.steps, self.dropped, strict=True)
        return tuple(0 if is_dropped else slice(None, None, step) for step, is_dropped in pairs)


def select(text: str, shape: tuple[int, ...]) -> Selection:
    """Parse ``text``, with or without brackets, for a tensor of ``shape``; empty text selects all.
    Raises ``CheckpointError`` if it is not a slice, or does not fit."""
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1].strip()
    parts = [part.strip() for part in inner.split(",")] if inner else []
    if len(parts) > 1 and not parts[-1]:  # as in "3,"
        parts.pop()
    parts = _spread(parts, shape, text)
    found = [_one(part, size, text) for part, size in zip(parts, shape, strict=True)]
    starts, counts, steps, dropped = ([one[i] for one in found] for i in range(4))
    box = Box(tuple(map(int, starts)), tuple(map(int, counts)))
    return Selection(box, tuple(map(int, steps)), tuple(map(bool, dropped)))


def _spread(parts: list[str], shape: tuple[int, ...], text: str) -> list[str]:
    """One part per dimension: ``...``, or else the end, stands for those that are not named."""
    at = parts.index("...") if "..." in parts else len(parts)
    named = parts[:at] + parts[at + 1 :]
    if len(named) > len(shape):
        raise CheckpointError(
            f"slice {text!r}: {counted(len(named), 'index', 'indices')}, but the tensor has "
            f"{counted(len(shape), 'dimension')} {list(shape)}"
        )
    if "..." in named:
        raise CheckpointError(f"slice {text!r}: '...' may occur only once")
    return [*named[:at], *[":"] * (len(shape) - len(named)), *named[at:]]


def _one(part: str, size: int, text: str) -> tuple[int, int, int, bool]:
    """Start, how many elements from there on, step, and whether it is a single index."""
    if ":" not in part:
        index = _integer(part, text)
        if not -size <= index < size:
            raise CheckpointError(
                f"slice {text!r}: index {index} is outside of a dimension of size {size}"
            )
        return index % size, 1, 1, True
    bounds = [_integer(bound, text) if bound.strip() else None for bound in part.split(":")]
    if len(bounds) > 3:
        raise CheckpointError(f"slice {text!r}: {part!r} has more than two colons; {_HELP}")
    if len(bounds) > 2 and bounds[2] is not None and bounds[2] < 1:
        raise CheckpointError(f"slice {text!r}: a step must be at least 1, got {bounds[2]}")
    start, stop, step = slice(*bounds).indices(size)
    count = len(range(start, stop, step))
    return min(start, size), (count - 1) * step + 1 if count else 0, step, False


def _integer(text: str, whole: str) -> int:
    if not _INTEGER.fullmatch(text.strip()):
        raise CheckpointError(f"slice {whole!r}: cannot read {text.strip()!r}; {_HELP}")
    return int(text)
