"""The sharding of a tensor over ranks: recorded when it is sharded, pure arithmetic afterwards.

A shard divides what the previous ones have left, by the rule of ``torch.chunk``: chunks of the
rounded-up size, then a shorter one, then empty ones. So the part of a tensor that a rank has
follows from its shards, in the order in which they were made, and from the rank's position on the
mesh, without torch and without communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product

from ..errors import CheckpointError
from .box import Box


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


# The axes of a run's ranks, the outermost first. To add one: name it here, give it a size in
# ``ParallelSection``, and say in ``World`` whether its ranks see other examples.
AXES = ("pp", "dp_replicate", "dp_shard", "tp")
DATA_AXES = AXES[1:3]  # along these, ranks see other examples
_CUTS = (AxisShard("tp", 0), AxisShard("dp_shard", 0))
_MOST = 65_536  # processes: their folders have five digits


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
        for axis, size in asdict(self).items():
            if size < 1:
                raise CheckpointError(f"mesh: {axis} must be at least 1, got {size}")
        if self.size > _MOST:
            raise CheckpointError(f"mesh: {self.size:,} ranks are more than {_MOST:,}")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def axes(self) -> dict[str, int]:
        """The size of every axis, in order; empty for a single rank, as in a run."""
        return asdict(self) if self.size > 1 else {}

    def boxes(self, shape: tuple[int, ...]) -> Iterator[tuple[Sequence[int], Box]]:
        """The non-empty boxes of a tensor, and the ranks that have each. A tensor without
        dimensions or elements is replicated, and assigned to rank 0."""
        full_box = Box.whole(shape)
        if not shape or not full_box.size:
            yield (0,), full_box
            return
        sizes, step = asdict(self), self.dp_shard * self.tp
        for first, (shard, part) in enumerate(product(range(self.dp_shard), range(self.tp))):
            box = Box(*local_offset_and_shape(shape, _CUTS, sizes, {"dp_shard": shard, "tp": part}))
            if box.size:
                yield range(first, self.size, step), box
