"""A fake mesh axis: messages of other ranks have the right size, which is all a dry run needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ...geometry.sharding import chunk


@dataclass(frozen=True)
class FakeAxis:
    """A ``parallel.collectives.Axis`` without other ranks; the first has the largest shard."""

    size: int
    rank: int = 0

    def spread(self, whole: nn.Parameter, dim: int | None) -> nn.Parameter:
        """The shard of the first rank, as a plain tensor."""
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
