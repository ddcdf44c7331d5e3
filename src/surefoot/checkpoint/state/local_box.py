"""The local box of a tensor on this rank.

Boxes are computed from the recorded sharding, not from torch's own offsets, which are wrong for
uneven shards of one dimension over two axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...errors import CheckpointError
from ...parallel.box import Box
from ...parallel.sharding import AxisShard, Cuts, local_offset_and_shape

BLOCK = 1 << 20  # elements read at a time


@dataclass(frozen=True)
class LocalBox:
    """The local part of one tensor."""

    values: torch.Tensor  # of the box; shares memory with the tensor
    shape: tuple[int, ...]  # of the whole tensor
    box: Box

    def narrowed(self, box: Box) -> LocalBox:
        """The part of it that is inside ``box``."""
        if box == self.box:
            return self
        return LocalBox(self.values.detach()[box.slices_in(self.box)], self.shape, box)

    def fill(self, read: Callable[[Box], torch.Tensor]) -> None:
        """Copy in the result of ``read`` for boxes of the full tensor, block by block."""
        for block in self.box.blocks(BLOCK) if self.box.size else ():
            self.values[block.slices_in(self.box)].copy_(read(block))


def local_box_of(name: str, tensor: torch.Tensor, cuts: Cuts | None = None) -> LocalBox:
    """The local box of ``tensor`` on this rank. A plain tensor is replicated on every rank; a
    tensor on the meta device is on other ranks, and its local box is empty.

    If ``cuts`` are not recorded, they are derived from the tensor's placements. Raises
    ``CheckpointError`` if these are not enough.
    """
    if tensor.is_meta:
        nothing = (0,) * tensor.ndim
        return LocalBox(tensor, tuple(tensor.shape), Box(nothing, nothing))
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return LocalBox(tensor, shape, Box.whole(shape))
    shape, mesh = tuple(tensor.shape), tensor.device_mesh
    sizes = dict(zip(_axes(tensor), mesh.shape, strict=True))
    place = dict(zip(sizes, mesh.get_coordinate() or [0] * mesh.ndim, strict=True))
    cuts = _plain_cuts(name, tensor) if cuts is None else cuts
    values, box = tensor.to_local(), Box(*local_offset_and_shape(shape, cuts, sizes, place))
    if tuple(values.shape) != box.shape:
        raise CheckpointError(
            f"{name}: this rank has {list(values.shape)}, expected {list(box.shape)} of "
            f"{list(shape)}"
        )
    return LocalBox(values, shape, box)


def _axes(tensor: DTensor) -> tuple[str, ...]:
    mesh = tensor.device_mesh
    return mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))


def _plain_cuts(name: str, tensor: DTensor) -> Cuts:
    """The sharding of a tensor whose axes shard it in their order on the mesh."""
    cuts = []
    for axis, placement in zip(_axes(tensor), tensor.placements, strict=True):
        if type(placement) is Shard:
            cuts.append(AxisShard(axis, placement.dim))
        elif not isinstance(placement, Replicate):
            raise CheckpointError(f"{name}: cannot store a tensor with the placements {placement}")
    return tuple(cuts)
