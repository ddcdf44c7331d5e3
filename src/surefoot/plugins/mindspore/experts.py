"""The experts of a layer as one stacked tensor, as MindSpore Transformers trains them.

Hugging Face's files contain matrices of every expert. ``StackedSource`` concatenates them, or
splits them again, transposed where needed; it reads only the requested boxes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import sub

import torch

from ...checkpoint.sources import ReplacingSource, Shape, TensorSource
from ...errors import CheckpointError, counted
from ...parallel.sharding import Box


@dataclass(frozen=True)
class StackedMatrix:
    """A matrix, or a part of one, inside a tensor."""

    name: str
    box: Box  # in the tensor
    start: tuple[int, ...]  # in ``name``
    is_turned: bool  # its rows are columns in the tensor


@dataclass(frozen=True)
class StackedSource(ReplacingSource):
    """Tensors that consist of tiles of others, which they replace."""

    tensors: Mapping[str, tuple[Shape, tuple[StackedMatrix, ...]]]

    def made(self) -> Mapping[str, tuple[Shape, Sequence[str]]]:
        """The stacked tensors, or the matrices of one."""
        return {n: (shape, [t.name for t in tiles]) for n, (shape, tiles) in self.tensors.items()}

    def read_made(self, name: str, box: Box) -> torch.Tensor:
        """From each tile only what is inside ``box``."""
        values = torch.empty(box.shape, dtype=self.dtypes()[name])
        for tile in self.tensors[name][1]:
            if (common := box & tile.box) is not None:
                tile_values = self._values(tile, common).reshape(common.shape)
                values[common.slices_in(box)].copy_(tile_values)
        return values

    def _values(self, tile: StackedMatrix, box: Box) -> torch.Tensor:
        first, size = list(map(sub, box.start, tile.box.start))[-2:], list(box.shape[-2:])
        if tile.is_turned:
            first, size = first[::-1], size[::-1]
        *outer, row, column = tile.start
        inner = Box((*outer, row + first[0], column + first[1]), (*(1 for _ in outer), *size))
        matrix = self.source.read(tile.name, inner).reshape(size)
        return matrix.T if tile.is_turned else matrix


@dataclass(frozen=True)
class Stack:
    """One tensor of a layer."""

    name: str  # after the name of the experts
    parts: tuple[str, ...]  # modules of an expert, beside each other


@dataclass(frozen=True)
class Experts:
    """How a family stacks the experts of a layer."""

    name: str  # in Hugging Face's layers
    router: str  # whose weight has a row for every expert
    stacks: tuple[Stack, ...]
    is_flat: bool  # turned matrices under each other; otherwise a dimension for the experts


MCORE = Experts(
    "mlp.experts",
    "mlp.gate",
    (Stack("weight1", ("gate_proj", "up_proj")), Stack("weight2", ("down_proj",))),
    is_flat=True,
)
MIXTRAL = Experts(
    "block_sparse_moe.experts",
    "block_sparse_moe.gate",
    tuple(Stack(f"{name}.weight", (name,)) for name in ("w1", "w2", "w3")),
    is_flat=False,
)
_LAYER = r"(model\.layers\.\d+\.)"


def stacked(source: TensorSource, experts: Experts) -> TensorSource:
    """``source`` with one tensor for all experts of a layer, which must have the same shapes."""
    shapes = source.shapes()
    pattern = re.compile(rf"{_LAYER}{re.escape(experts.name)}\.(\d+)\..*")
    counts: dict[str, int] = {}
    for name in shapes:
        if match := pattern.fullmatch(name):
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    tensors = {}
    for layer, count in counts.items():
        for stack in experts.stacks:
            names = [
                [f"{layer}{experts.name}.{i}.{part}.weight" for part in stack.parts]
                for i in range(count)
            ]
            rows, columns = _common_shape([n for row in names for n in row], shapes)
            extent = (columns, rows) if experts.is_flat else (1, rows, columns)
            tiles = tuple(
                StackedMatrix(
                    name, Box(_start(experts, i, j, extent), extent), (0, 0), experts.is_flat
                )
                for i, row in enumerate(names)
                for j, name in enumerate(row)
            )
            shape = (count * extent[0], len(stack.parts) * extent[1], *extent[2:])
            tensors[f"{layer}{experts.name}.{stack.name}"] = (shape, tiles)
    return StackedSource(source, tensors) if tensors else source


def unstacked(source: TensorSource, experts: Experts) -> TensorSource:
    """The inverse."""
    shapes = source.shapes()
    tensors = {}
    for stack in experts.stacks:
        pattern = re.compile(rf"{_LAYER}{re.escape(f'{experts.name}.{stack.name}')}")
        for name, shape in shapes.items():
            if (match := pattern.fullmatch(name)) is None:
                continue
            count, extent = _apart(name, shape, match[1], experts, stack, shapes)
            rows, columns = extent[::-1] if experts.is_flat else extent[-2:]
            for i in range(count):
                for j, part in enumerate(stack.parts):
                    box = Box((0, 0), (rows, columns))
                    tile = StackedMatrix(name, box, _start(experts, i, j, extent), experts.is_flat)
                    matrix_name = f"{match[1]}{experts.name}.{i}.{part}.weight"
                    tensors[matrix_name] = ((rows, columns), (tile,))
    return StackedSource(source, tensors) if tensors else source


def _start(experts: Experts, i: int, j: int, extent: tuple[int, ...]) -> tuple[int, ...]:
    """The position in the stack of the ``j``-th matrix of the ``i``-th expert."""
    return (i * extent[0], j * extent[1]) if experts.is_flat else (i, 0, 0)


def _common_shape(names: list[str], shapes: Mapping[str, Shape]) -> Shape:
    first = names[0]
    for name in names:
        if name not in shapes or shapes[name] != shapes.get(first) or len(shapes[name]) != 2:
            what = f"is {list(shapes[name])}" if name in shapes else "is missing"
            raise CheckpointError(
                f"{name[:200]!r} {what}, so the experts cannot be stacked; all must exist with "
                f"the size of {first[:200]!r}"
            )
    return shapes[first]


def _apart(
    name: str, shape: Shape, layer: str, experts: Experts, stack: Stack, shapes: Mapping[str, Shape]
) -> tuple[int, tuple[int, ...]]:
    """The number of experts in a stack, and the part of it that one matrix takes."""
    if not experts.is_flat:
        if len(shape) != 3:
            raise CheckpointError(f"{name[:200]!r}: expected three dimensions, found {list(shape)}")
        return shape[0], (1, *shape[1:])
    router = shapes.get(f"{layer}{experts.router}.weight")
    count = router[0] if router else 0
    if len(shape) != 2 or not count or shape[0] % count or shape[1] % len(stack.parts):
        experts_of = counted(count, "expert")
        reason = f"with a router for {experts_of}" if router else "whose router is missing"
        raise CheckpointError(f"{name[:200]!r} of shape {list(shape)}, {reason}, cannot be split")
    return count, (shape[0] // count, shape[1] // len(stack.parts))
