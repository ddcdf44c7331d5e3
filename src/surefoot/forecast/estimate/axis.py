"""The first of some processes that share every matrix. The others only seem to be there: what they
would send has its size, which is all that a rehearsal needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ...geometry.sharding import chunk


@dataclass(frozen=True)
class FakeAxis:
    """An axis (``parallel.collectives.Axis``) along which no one else is; the first process has
    the largest parts."""

    size: int
    rank: int = 0

    def spread(self, whole: nn.Parameter, dim: int | None) -> nn.Parameter:
        """The part of the first process, as a plain tensor."""
        part = whole.detach()
        if dim is not None:
            part = part.narrow(dim, *chunk(part.shape[dim], self.size, self.rank)).clone()
        return nn.Parameter(part, requires_grad=whole.requires_grad)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Of the size of a sum."""
        return x.clone(memory_format=torch.contiguous_format)

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """Of the size of the largest."""
        return self.sum(x)

    def each(self, x: torch.Tensor) -> list[torch.Tensor]:
        """As many as there would be."""
        return [torch.empty_like(x) for _ in range(self.size)]

    def sum_of_mine(self, parts: torch.Tensor) -> torch.Tensor:
        """Of the size of a part."""
        return parts.new_empty(parts.shape[1:])
