"""Statistics of tensors, in 64-bit arithmetic and one block of memory, whatever their size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...parallel.box import Box
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
