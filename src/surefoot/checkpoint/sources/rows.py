"""A view over a tensor source in which some rows are those of an adapter: embeddings of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...geometry.box import Box
from .source import Shape, TensorSource


@dataclass(frozen=True)
class ReplacedRows:
    """``base`` with rows from ``adapter``: by the name of a matrix, the adapter's tensor, and the
    row that each row of it replaces."""

    base: TensorSource
    adapter: TensorSource
    rows: Mapping[str, tuple[str, Sequence[int]]]

    def shapes(self) -> Mapping[str, Shape]:
        """Unchanged."""
        return self.base.shapes()

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Unchanged."""
        return self.base.dtypes()

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The values of the base, but for those rows."""
        found = self.base.read(name, box)
        if name not in self.rows:
            return found
        key, ids = self.rows[name]
        found = found.clone()
        for own, row in enumerate(ids):
            if box.start[0] <= row < box.stop[0]:
                part = Box((own, *box.start[1:]), (1, *box.shape[1:]))
                found[row - box.start[0]] = self.adapter.read(key, part)[0].to(found.dtype)
        return found
