"""What passes between processes inside a layer, forward and backward.

Two of them frame a pair of cut matrices, as in Megatron-LM (arXiv:1909.08053): ``copied`` before
the first, ``summed`` after the second. Each is the other's mirror image: where the forward pass of
one does nothing, its backward pass adds up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from ..cuts import chunk


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh, as one of the processes along it sees it."""

    mesh: DeviceMesh  # of one dimension

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.mesh.size()

    @property
    def group(self) -> dist.ProcessGroup:
        """The processes."""
        return self.mesh.get_group()

    def part(self, length: int) -> slice:
        """What this process has of ``length`` elements."""
        first, count = chunk(length, self.size, self.mesh.get_local_rank())
        return slice(first, first + count)


def copied(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """``x``, the same in all processes; its gradient is the sum of theirs."""
    return cast(torch.Tensor, _Copied.apply(x, axis))  # type: ignore[no-untyped-call]


def summed(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of all processes' ``x``."""
    return cast(torch.Tensor, _Summed.apply(x, axis))  # type: ignore[no-untyped-call]


def gathered(x: torch.Tensor, axis: Axis, length: int) -> torch.Tensor:
    """The parts of all processes, joined to ``length`` elements along the last dimension."""
    return cast(torch.Tensor, _Gathered.apply(x, axis, length))  # type: ignore[no-untyped-call]


def taken(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This process's part of the last dimension of ``x``, which is the same in all processes."""
    return cast(torch.Tensor, _Taken.apply(x, axis))  # type: ignore[no-untyped-call]


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(gradients[0], ctx.axis), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        return _sum(x, axis)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, length: int) -> torch.Tensor:
        ctx.part = axis.part(length)
        return _gather(x, axis, length)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0][..., ctx.part].contiguous(), None, None


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis, ctx.length = axis, x.shape[-1]
        return x[..., axis.part(ctx.length)].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather(gradients[0], ctx.axis, ctx.length), None


def _sum(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=axis.group)
    return total


def _gather(x: torch.Tensor, axis: Axis, length: int) -> torch.Tensor:
    """Parts of unequal length are filled up: an all-gather knows one length only."""
    counts = [chunk(length, axis.size, index)[1] for index in range(axis.size)]
    mine = F.pad(x, (0, counts[0] - x.shape[-1])).contiguous()
    parts = [torch.empty_like(mine) for _ in counts]
    dist.all_gather(parts, mine, group=axis.group)
    return torch.cat([p[..., :count] for p, count in zip(parts, counts, strict=True)], dim=-1)
