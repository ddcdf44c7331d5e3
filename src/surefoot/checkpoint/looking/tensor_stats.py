"""Statistics of tensors, in 64-bit arithmetic and one block of memory, whatever their size; and a
part of one tensor, or only its edges if it is too large to print."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from ...errors import CheckpointError
from ...parallel.box import Box, Selection
from ..sources.source import TensorSource

BLOCK = 1 << 18  # elements; 2 MB in 64 bits, so that they stay in the cache


@dataclass(frozen=True)
class Norms:
    """Statistics over the finite values (or their real and imaginary parts); None without any."""

    l2: float
    minimum: float | None
    maximum: float | None
    mean: float | None
    num_nan: int
    num_inf: int


def norms(source: TensorSource, name: str) -> Norms:
    """The statistics of one tensor, read block by block."""
    l2, total, count, num_nan, num_inf = 0.0, 0.0, 0, 0, 0
    low, high = math.inf, -math.inf
    for box in blocks(source.shapes()[name]):
        values = in_double(source.read(name, box))
        if not are_finite(values):
            num_nan += int(values.isnan().sum())
            num_inf += int(values.isinf().sum())
            values = values[values.isfinite()]
        if values.numel():
            first, last = map(float, values.aminmax())
            low, high = min(low, first), max(high, last)
            l2 = math.hypot(l2, norm(values))
            total += float(values.sum())
            count += values.numel()
    if not count:
        return Norms(0.0, None, None, None, num_nan, num_inf)
    return Norms(l2, low, high, total / count, num_nan, num_inf)


def blocks(shape: tuple[int, ...]) -> Iterator[Box]:
    """The boxes in which to read a tensor of ``shape``, one after another."""
    return Box.whole(shape).blocks(BLOCK)


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    """All values in one dimension and 64 bits."""
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return parts.reshape(-1).to(torch.float64)


def are_finite(values: torch.Tensor) -> bool:
    """Whether no value is nan or infinite; much faster than a test of each value."""
    return not values.numel() or all(math.isfinite(end) for end in values.aminmax())


def norm(values: torch.Tensor) -> float:
    """L2 norm of 64-bit values, without overflow or underflow of the squares."""
    largest = max(abs(float(end)) for end in values.aminmax()) if values.numel() else 0.0
    if largest == 0 or math.isinf(largest):  # a difference may overflow
        return largest
    if 1e-140 < largest < 1e140:
        return math.sqrt(float(values.dot(values)))
    return largest * math.sqrt(float((values / largest).square().sum()))


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
