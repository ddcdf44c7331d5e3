"""Boxes: rectangular parts of tensors, as integers. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod


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
