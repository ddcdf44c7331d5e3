"""A mesh of ranks, and the boxes of a tensor that each rank has.

Tensors are sharded as in a run: by tensor parallelism first, then by FSDP2, by the rule of
``torch.chunk``. But here all shards are along the first dimension. The plan of an architecture says
which tensors a run shards along the second; any mesh can read any sharding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product

from ..errors import CheckpointError
from .box import Box
from .sharding import AxisShard, local_offset_and_shape

# The axes of a run's ranks, the outermost first. To add one: name it here, give it a size in
# ``ParallelSection``, and say in ``World`` whether its ranks see other examples.
AXES = ("pp", "dp_replicate", "dp_shard", "tp")
DATA_AXES = AXES[1:3]  # along these, ranks see other examples
_CUTS = (AxisShard("tp", 0), AxisShard("dp_shard", 0))
_MOST = 65_536  # processes: their folders have five digits


@dataclass(frozen=True)
class Mesh:
    """``dp_replicate`` replicas of a model, each sharded over ``dp_shard`` times ``tp`` ranks."""

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
        whole = Box.whole(shape)
        if not shape or not whole.size:
            yield (0,), whole
            return
        sizes, step = asdict(self), self.dp_shard * self.tp
        for first, (shard, part) in enumerate(product(range(self.dp_shard), range(self.tp))):
            box = Box(*local_offset_and_shape(shape, _CUTS, sizes, {"dp_shard": shard, "tp": part}))
            if box.size:
                yield range(first, self.size, step), box
