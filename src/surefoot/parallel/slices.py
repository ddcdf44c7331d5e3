"""A numpy slice as text, ``0, :, -3:, 0:100:10``, and the box of a tensor that it needs. Pure.

Not supported: new axes, masks and negative steps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import CheckpointError, counted
from .box import Box

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
