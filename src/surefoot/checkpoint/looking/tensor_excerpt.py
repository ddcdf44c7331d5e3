"""A part of one tensor, or only its edges if it is too large to print."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from ...errors import CheckpointError
from ...parallel.box import Box
from ...parallel.slices import Selection
from ..sources.source import TensorSource

MAX_READ = 1 << 26  # elements; what is read for one excerpt stays in memory
EDGE = 3  # values shown at either end of a dimension that is cut short
_MAX_PIECES = 64

Range = tuple[int, int]  # first and one past the last, in elements of the selection


@dataclass(frozen=True)
class Excerpt:
    """Values in the selection's shape; in a shortened dimension, ``EDGE`` values of each end."""

    values: torch.Tensor
    is_cut: tuple[bool, ...]  # by dimension of ``values``


def excerpt(source: TensorSource, name: str, selection: Selection, limit: int) -> Excerpt:
    """Read the selection, or its edges if it has over ``limit`` values; these must be few."""
    ranges = [_ranges(count, prod(selection.shape) > limit) for count in selection.counts]
    boxes = prod(len(dim) for dim in ranges)
    size = selection.box.size if boxes == 1 else boxes
    if size > MAX_READ or boxes > _MAX_PIECES:
        raise CheckpointError(
            f"{name}: {size:,} values would be read to show these; take a smaller slice"
        )
    found = _read(source, name, selection, ranges, ())
    kept = [i for i, is_dropped in enumerate(selection.dropped) if not is_dropped]
    shape = [found.shape[i] for i in kept]
    return Excerpt(found.reshape(shape), tuple(len(ranges[i]) > 1 for i in kept))


def _ranges(count: int, is_large: bool) -> list[Range]:
    if is_large and count > 2 * EDGE:
        return [(0, EDGE), (count - EDGE, count)]
    return [(0, count)]


def _read(
    source: TensorSource,
    name: str,
    selection: Selection,
    ranges: list[list[Range]],
    chosen: tuple[Range, ...],
) -> torch.Tensor:
    """Concatenate the pieces of the remaining dimensions."""
    dim = len(chosen)
    if dim < len(ranges):
        parts = [_read(source, name, selection, ranges, (*chosen, one)) for one in ranges[dim]]
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0]
    pairs = list(zip(chosen, selection.steps, strict=True))
    start = (first * step for (first, _), step in pairs)
    box = Box(
        tuple(a + b for a, b in zip(selection.box.start, start, strict=True)),
        tuple(
            (last - first - 1) * step + 1 if last > first else 0 for (first, last), step in pairs
        ),
    )
    return source.read(name, box)[tuple(slice(None, None, step) for step in selection.steps)]
