"""The sharding of a tensor over ranks: recorded when it is sharded, pure arithmetic afterwards.

A shard divides what the previous ones have left, by the rule of ``torch.chunk``: chunks of the
rounded-up size, then a shorter one, then empty ones. So the part of a tensor that a rank has
follows from its shards, in the order in which they were made, and from the rank's position on the
mesh, without torch and without communication. A ``Box`` is such a part, as integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from ..errors import CheckpointError


@dataclass(frozen=True)
class AxisShard:
    """``dim`` of a tensor is sharded over the ranks along ``axis`` of the mesh."""

    axis: str
    dim: int


@dataclass(frozen=True)
class FusedSlice:
    """A tensor inside a fused one, which is the tensor that is sharded. Leading dimensions of the
    fused tensor that it lacks have size 1."""

    shape: tuple[int, ...]  # of the larger one
    start: tuple[int, ...]  # in it
    cuts: tuple[AxisShard, ...]


Cuts = tuple[AxisShard, ...] | FusedSlice  # in the order in which they were made


def axes(cuts: Cuts) -> set[str]:
    """The axes that shard a tensor."""
    return {cut.axis for cut in (cuts.cuts if isinstance(cuts, FusedSlice) else cuts)}


def chunk(length: int, count: int, index: int) -> tuple[int, int]:
    """First element and number of elements of chunk ``index``, as in ``torch.chunk``."""
    size = -(-length // count)
    first = min(index * size, length)
    return first, min(size, length - first)


# By arithmetic over recorded shards, since torch computes the offsets of uneven shards wrongly
# where FSDP follows tensor parallelism: a checkpoint that believes them is damaged
# (docs/decisions/0023).
def local_offset_and_shape(
    shape: Sequence[int], cuts: Cuts, sizes: Mapping[str, int], place: Mapping[str, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Start and shape of the local box of one rank; empty if a ``FusedSlice`` is on other ranks.

    Args:
        shape: the full shape of the tensor.
        cuts: its shards, in order.
        sizes: of the axes of the mesh, by name; a missing axis has size 1.
        place: the position of the rank on each axis.
    """
    if isinstance(cuts, FusedSlice):
        return _seen(shape, cuts, *local_offset_and_shape(cuts.shape, cuts.cuts, sizes, place))
    start, extent = [0] * len(shape), list(shape)
    for cut in cuts:
        first, length = chunk(extent[cut.dim], sizes.get(cut.axis, 1), place.get(cut.axis, 0))
        start[cut.dim], extent[cut.dim] = start[cut.dim] + first, length
    return tuple(start), tuple(extent)


def _seen(
    shape: Sequence[int], window: FusedSlice, start: Sequence[int], extent: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The part of a box of the fused tensor that is inside the slice, relative to the slice."""
    num_left_out = len(window.shape) - len(shape)
    sizes = (*[1] * num_left_out, *shape)
    first = [max(a, b) for a, b in zip(start, window.start, strict=True)]
    stops = [(a + n, b + m) for a, n, b, m in zip(start, extent, window.start, sizes, strict=True)]
    lengths = [min(stop) - a for stop, a in zip(stops, first, strict=True)]
    if any(length <= 0 for length in lengths):
        return (0,) * len(shape), (0,) * len(shape)
    inside = tuple(a - b for a, b in zip(first, window.start, strict=True))
    return inside[num_left_out:], tuple(lengths[num_left_out:])


# The axes of a run's ranks, the outermost first; nothing else depends on their order. To add one:
# name it here, and give it a size in ``ParallelSection``.
AXES = ("pp", "dp_replicate", "dp_shard", "tp")
DATA_AXES = ("dp_replicate", "dp_shard")  # along these, ranks see other examples
_CUTS = (AxisShard("tp", 0), AxisShard("dp_shard", 0))
_MOST = 65_536  # processes: their folders have five digits


def ranks_at(sizes: Mapping[str, int], place: Mapping[str, int]) -> Sequence[int]:
    """The ranks of a mesh of these ``sizes`` at some coordinates, in order."""
    ranks = [0]
    for axis, size in sizes.items():
        coordinates = [place[axis]] if axis in place else range(size)
        ranks = [rank * size + at for rank in ranks for at in coordinates]
    return ranks


@dataclass(frozen=True)
class Mesh:
    """``dp_replicate`` replicas of a model, each sharded over ``dp_shard`` times ``tp`` ranks: by
    tensor parallelism first, then by FSDP2, as in a run. But here all shards are along the first
    dimension. The plan of an architecture says which tensors a run shards along the second; any
    mesh can read any sharding."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis, size in vars(self).items():
            if size < 1:
                raise CheckpointError(f"mesh: {axis} must be at least 1, got {size}")
        if self.size > _MOST:
            raise CheckpointError(f"mesh: {self.size:,} ranks are more than {_MOST:,}")

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every axis, in the order of a run's."""
        own = vars(self)
        return {axis: own[axis] for axis in AXES if axis in own}

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.sizes.values())

    @property
    def axes(self) -> dict[str, int]:
        """The size of every axis, in order; empty for a single rank, as in a run."""
        return self.sizes if self.size > 1 else {}

    def boxes(self, shape: tuple[int, ...]) -> Iterator[tuple[Sequence[int], Box]]:
        """The non-empty boxes of a tensor, and the ranks that have each. A tensor without
        dimensions or elements is replicated, and assigned to rank 0."""
        full_box = Box.whole(shape)
        if not shape or not full_box.size:
            yield (0,), full_box
            return
        sizes = self.sizes
        for shard, part in product(range(self.dp_shard), range(self.tp)):
            place = {"dp_shard": shard, "tp": part}
            box = Box(*local_offset_and_shape(shape, _CUTS, sizes, place))
            if box.size:
                yield ranks_at(sizes, place), box


@dataclass(frozen=True, order=True, slots=True)
class Box:
    """The half-open box ``[start, start + shape)`` inside a tensor. A scalar is ``Box((), ())``."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.shape):
            raise ValueError(f"start {self.start} and shape {self.shape} differ in length")
        if min(self.start + self.shape, default=0) < 0:
            raise ValueError(f"start {self.start} and shape {self.shape} must not be negative")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """The box that contains all of a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the last index, per dimension."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def __and__(self, other: Box) -> Box | None:
        """The intersection; None if it is empty."""
        if self == other and self.size:  # most tensors are in one piece
            return self
        start, shape = [], []
        ranges = zip(self.start, self.shape, other.start, other.shape, strict=True)
        for first, length, other_first, other_length in ranges:
            start.append(max(first, other_first))
            shape.append(min(first + length, other_first + other_length) - start[-1])
            if shape[-1] <= 0:
                return None
        return Box(tuple(start), tuple(shape))

    def __contains__(self, other: Box) -> bool:
        """Whether all of ``other`` is inside this box."""
        ranges = zip(self.start, self.shape, other.start, other.shape, strict=True)
        for first, length, other_first, other_length in ranges:
            if not first <= other_first <= other_first + other_length <= first + length:
                return False
        return True

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """The index of this box in a tensor that contains ``outer``."""
        starts = (a - o for a, o in zip(self.start, outer.start, strict=True))
        return tuple(slice(a, a + n) for a, n in zip(starts, self.shape, strict=True))

    def moved_into(self, outer: Box) -> Box:
        """This box relative to the start of ``outer``."""
        start = tuple(a - o for a, o in zip(self.start, outer.start, strict=True))
        return Box(start, self.shape)

    def blocks(self, limit: int) -> Iterator[Box]:
        """Split into boxes of at most ``limit`` elements, each contiguous, in row-major order."""
        if self.size <= limit or not self.shape:
            yield self
            return
        row = self.size // self.shape[0]
        step = max(1, limit // row)
        for first in range(0, self.shape[0], step):
            rows = min(step, self.shape[0] - first)
            block = Box((self.start[0] + first, *self.start[1:]), (rows, *self.shape[1:]))
            if rows > 1 or row <= limit or len(self.shape) == 1:
                yield block
            else:
                inner = Box(self.start[1:], self.shape[1:])
                for part in inner.blocks(limit):
                    yield Box((block.start[0], *part.start), (1, *part.shape))

    def runs_in(self, outer: Box) -> Iterator[tuple[int, int]]:
        """The position of this box in the row-major elements of ``outer``: ranges of (first
        element, count).

        The ranges are in order; concatenated, they are this box in row-major order. Trailing
        dimensions that the box fills are folded, so that a box of complete rows is one range.
        """
        if not self.size:
            return
        if self.shape == outer.shape:
            yield 0, self.size
            return
        fold = len(self.shape)
        while fold and self.shape[fold - 1] == outer.shape[fold - 1]:
            fold -= 1
        fold = max(fold - 1, 0)  # the last dimension that is cut still gives contiguous elements
        strides = [prod(outer.shape[d + 1 :]) for d in range(len(outer.shape))]
        inside = [a - o for a, o in zip(self.start, outer.start, strict=True)]
        length = prod(self.shape[fold:])
        first = sum(a * s for a, s in zip(inside[fold:], strides[fold:], strict=True))
        for index in product(
            *(range(a, a + n) for a, n in zip(inside[:fold], self.shape[:fold], strict=True))
        ):
            yield first + sum(i * s for i, s in zip(index, strides[:fold], strict=True)), length


MAX_CUT_DIMS = 8  # along which the boxes of one tensor may be cut


def is_covered_once(whole: Box, boxes: Sequence[Box]) -> bool:
    """Whether ``boxes`` cover every element of ``whole`` exactly once, and no other.

    The mixed differences of an indicator function are its corners with alternating signs, and they
    determine it. So the boxes sum to the indicator of ``whole`` exactly if their signed corners do.
    The cost is linear in the number of boxes. More than 8 sharded dimensions are rejected.
    """
    if len(boxes) == 1 and boxes[0] == whole:
        return True
    if any(len(box.shape) != len(whole.shape) or box not in whole for box in boxes):
        return False
    if not whole.size:
        return len(boxes) == 1
    if not all(box.size for box in boxes):
        return False
    cut = [
        d
        for d in range(len(whole.shape))
        if any((b.start[d], b.shape[d]) != (whole.start[d], whole.shape[d]) for b in boxes)
    ]
    if len(cut) > MAX_CUT_DIMS or not boxes:
        return False
    corners: dict[tuple[int, ...], int] = {}
    for sign, box in [(-1, whole), *((1, box) for box in boxes)]:
        for ends in product(*(((box.start[d], 1), (box.stop[d], -1)) for d in cut)):
            at = tuple(end for end, _ in ends)
            corners[at] = corners.get(at, 0) + sign * prod(side for _, side in ends)
    return not any(corners.values())
