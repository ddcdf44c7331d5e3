"""A view of a source in which the weights of linear layers are quantized, rows by rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from ...checkpoint.sources.source import Shape, TensorSource, once
from ...parallel.box import Box
from .schemes import SHAPE, WeightScheme

_CHUNK = 1 << 20  # weights that are quantized at a time


@dataclass(frozen=True)
class QuantizedSource:
    """``source`` with the tensors of a ``scheme`` in the place of each of ``weights``. They are
    rounded as they are read, so memory grows neither with the model nor with a tensor."""

    source: TensorSource
    scheme: WeightScheme
    weights: frozenset[str]

    @once
    def _parts(self) -> Mapping[str, tuple[str, str, Shape, torch.dtype]]:
        """Weight, role, shape and dtype of every new tensor."""
        shapes, dtypes = self.source.shapes(), self.source.dtypes()
        return {
            f"{name.removesuffix('weight')}{role}": (name, role, *found)
            for name in shapes
            if name in self.weights
            for role, found in self.scheme.parts(shapes[name], dtypes[name]).items()
        }

    @once
    def shapes(self) -> Mapping[str, Shape]:
        """Of the new tensors, and of the others."""
        kept = {n: s for n, s in self.source.shapes().items() if n not in self.weights}
        return kept | {name: part[2] for name, part in self._parts().items()}

    @once
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Of the new tensors, and of the others."""
        kept = {n: d for n, d in self.source.dtypes().items() if n not in self.weights}
        return kept | {name: part[3] for name, part in self._parts().items()}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Computed from the rows of the weight that it depends on."""
        if name not in self._parts():
            return self.source.read(name, box)
        weight, role, shape, _ = self._parts()[name]
        if role == SHAPE:
            found = torch.tensor(self.source.shapes()[weight])
        else:
            rows = [self._rows(weight, role, part) for part in self._split(weight, role, box)]
            found = torch.cat(rows)
            box = Box((0, *box.start[1:]), box.shape)
            shape = (len(found), *shape[1:])
        return found[box.slices_in(Box.whole(shape))]

    def _split(self, weight: str, role: str, box: Box) -> Iterator[Box]:
        """Some rows of the new tensor at a time."""
        columns = self.source.shapes()[weight][1]
        step = max(1, _CHUNK // columns)
        if role == "weight_scale":
            step = max(1, step // self.scheme.row_block)
        for first in range(box.start[0], box.stop[0], step):
            yield Box((first, 0), (min(step, box.stop[0] - first), columns))

    def _rows(self, weight: str, role: str, rows: Box) -> torch.Tensor:
        """The ``rows`` of the new tensor; those of the weight that share a scale are read whole."""
        block, columns = self.scheme.row_block, rows.shape[1]
        first, stop = rows.start[0], rows.stop[0]
        if role == "weight_scale":
            start, end = first * block, stop * block
        else:
            start, end = first // block * block, -(-stop // block) * block
        read = self.source.read(weight, Box((start, 0), (end - start, columns)))
        found = self.scheme.compress(read, weight)[role]
        return found if role == "weight_scale" else found[first - start : stop - start]
