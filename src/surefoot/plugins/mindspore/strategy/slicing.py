"""The slice of a tensor on a device: MindSpore's arithmetic of tensor layouts. Pure.

Devices form a matrix; a tensor's dimension is sharded along some of its axes, into equal parts. An
axis that shards no dimension contains replicas. The optimizer may shard dimension 0 of these again
(optimizer parallelism), so that no two devices have the same slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ....errors import CheckpointError, counted
from ....parallel.box import Box

ALL_COPIES = -1  # as a number of shards: over all devices that hold copies
_WHOLE = -1  # in a tensor map: no axis cuts this dimension

Cut = tuple[int, int]  # into how many parts, and which of them


@dataclass(frozen=True)
class TensorLayout:
    """The layout of one tensor on the devices of its pipeline stage, as in a strategy file."""

    device_matrix: tuple[int, ...]
    tensor_map: tuple[tuple[int, ...], ...]  # one for all dimensions, or one for each
    num_shards: int = 0  # of the optimizer, within what the matrix leaves; 0: it cuts nothing
    step: int = 0  # between the devices that share these shards; follows from the rest

    @property
    def num_devices(self) -> int:
        """Of the stage."""
        return prod(self.device_matrix)

    def axes(self, num_dims: int) -> tuple[tuple[int, ...], ...]:
        """The axes of the matrix, counted from the left, that shard each dimension."""
        maps = self.tensor_map
        if len(maps) == 1 and len(maps[0]) == num_dims:
            maps = tuple((axis,) for axis in maps[0])
        if len(maps) != num_dims:
            sharded = counted(len(maps), "dimension")
            raise CheckpointError(f"it is sharded in {sharded} and has {num_dims}")
        last = len(self.device_matrix) - 1
        found = tuple(tuple(last - axis for axis in own if axis != _WHOLE) for own in maps)
        flat = [axis for own in found for axis in own]
        if len(set(flat)) < len(flat) or not all(0 <= axis <= last for axis in flat):
            raise CheckpointError(f"tensor map {maps} does not fit the devices {self._matrix}")
        return found

    def counts(self, num_dims: int) -> tuple[int, ...]:
        """The number of parts of each dimension."""
        return tuple(count * shards for (count, _), (shards, _) in self._cuts(num_dims, 0))

    def box(self, shape: tuple[int, ...], device: int) -> Box:
        """The slice of a full tensor on one device of the stage; parts must be equal."""
        start, extent = [], []
        for length, (outer, inner) in zip(shape, self._cuts(len(shape), device), strict=True):
            parts = outer[0] * inner[0]
            if length % parts:
                raise CheckpointError(f"a dimension of {length} is not {parts} equal parts")
            part = length // parts
            start.append((outer[1] * inner[0] + inner[1]) * part)
            extent.append(part)
        return Box(tuple(start), tuple(extent))

    def whole(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """The full shape of the tensor of which each device has a ``part``."""
        return tuple(n * count for n, count in zip(part, self.counts(len(part)), strict=True))

    def _cuts(self, num_dims: int, device: int) -> list[tuple[Cut, Cut]]:
        """For each dimension, its shards by the matrix, and then by the optimizer."""
        places, found = self._places(device), list[tuple[Cut, Cut]]()
        for own in self.axes(num_dims):
            count, index = 1, 0
            for axis in own:
                size = self.device_matrix[axis]
                count, index = count * size, index * size + places[axis]
            found.append(((count, index), (1, 0)))
        if self.num_shards and found:
            used = {axis for own in self.axes(num_dims) for axis in own}
            found[0] = found[0][0], self._shard(places, used)
        return found

    def _places(self, device: int) -> list[int]:
        """The position of a device along every axis, the last one fastest."""
        places = []
        for size in reversed(self.device_matrix):
            device, place = divmod(device, size)
            places.append(place)
        return places[::-1]

    def _shard(self, places: list[int], used: set[int]) -> Cut:
        """The optimizer's shards: over axes of replicas, from the right, until they are enough."""
        free = [axis for axis in range(len(places)) if axis not in used]
        copies = prod(self.device_matrix[axis] for axis in free)
        count = copies if self.num_shards == ALL_COPIES else self.num_shards
        left, index, weight = count, 0, 1
        for axis in reversed(free):
            part = min(self.device_matrix[axis], left)
            if left % part or self.device_matrix[axis] % part:
                break
            index += places[axis] % part * weight
            weight, left = weight * part, left // part
        if left != 1 or count < 1:
            raise CheckpointError(
                f"{self.num_shards} shards of the optimizer do not fit the devices {self._matrix}"
            )
        return count, index

    @property
    def _matrix(self) -> str:
        return " x ".join(map(str, self.device_matrix))
