"""Resized embeddings: a view over a tensor source that adds rows for new tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ...checkpoint.sources.source import Shape, TensorSource
from ...geometry.box import Box

BLOCK = 4 << 20  # elements read at a time


@dataclass(frozen=True)
class Grown:
    """``source`` with ``rows`` rows in some matrices; the new ones are the mean of the old."""

    source: TensorSource
    names: frozenset[str]
    rows: int
    _means: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def shapes(self) -> Mapping[str, Shape]:
        """More rows in the resized ones."""
        return {
            name: (self.rows, *shape[1:]) if name in self.names else shape
            for name, shape in self.source.shapes().items()
        }

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Unchanged."""
        return self.source.dtypes()

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Old rows unchanged, new rows all alike."""
        if name not in self.names:
            return self.source.read(name, box)
        columns = self.source.shapes()[name][1]
        old = self.source.shapes()[name][0]
        parts = []
        if common := box & Box((0, 0), (old, columns)):
            parts.append(self.source.read(name, common))
        if new := box & Box((old, 0), (self.rows - old, columns)):
            mean = self._mean(name)[new.start[1] : new.stop[1]]
            parts.append(mean.to(self.dtypes()[name]).expand(new.shape))
        return torch.cat(parts)

    def _mean(self, name: str) -> torch.Tensor:
        if name not in self._means:
            shape = self.source.shapes()[name]
            total = torch.zeros(shape[1], dtype=torch.float64)
            for box in Box.whole(shape).blocks(max(BLOCK, shape[1])):
                total += self.source.read(name, box).double().sum(0)
            self._means[name] = (total / shape[0]).float()
        return self._means[name]
