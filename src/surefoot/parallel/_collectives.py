"""Differentiable collectives used inside a layer (all-reduce, all-gather, reduce-scatter), with
their backward passes.

Two of them enclose a pair of sharded matrices, as in Megatron-LM (arXiv:1909.08053):
``copy_to_tp_region`` before the first, ``reduce_from_tp_region`` after the second. Each is the
other's mirror image: one does nothing in the forward pass and sums in the backward pass.
``gather_from_sequence_region`` and ``reduce_scatter_to_sequence_region`` replace them if
activations are sharded along the sequence (arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F

from .sharding import chunk
from .world import Axis

Change = Callable[[torch.Tensor], torch.Tensor]


def part(length: int, axis: Axis) -> slice:
    """This rank's shard of ``length`` elements."""
    first, count = chunk(length, axis.size, axis.rank)
    return slice(first, first + count)


def copy_to_tp_region(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """``x``, the same on all ranks; its gradient is the sum of theirs."""
    return through(x, lambda x: x.view_as(x), axis.sum)


def reduce_from_tp_region(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of all ranks' ``x``."""
    return through(x, axis.sum, lambda gradient: gradient)


def gather_from_tp_region(x: torch.Tensor, axis: Axis, length: int, dim: int = -1) -> torch.Tensor:
    """The shards of all ranks, concatenated to ``length`` elements along ``dim``. Later
    computation is the same on all ranks, and so is its gradient."""
    shard = part(length, axis)
    return through(x, lambda x: _gather(x, axis, length, dim), lambda g: _take(g, shard, dim))


def scatter_to_tp_region(x: torch.Tensor, axis: Axis, dim: int = -1) -> torch.Tensor:
    """This rank's shard, along ``dim``, of ``x``, which is the same on all ranks."""
    length = x.shape[dim]
    shard = part(length, axis)
    return through(x, lambda x: _take(x, shard, dim), lambda g: _gather(g, axis, length, dim))


def gather_from_sequence_region(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """As ``gather_from_tp_region``, of equal shards; but later computation differs between
    ranks, so gradients are summed."""
    return through(x, lambda x: _join(x, axis, dim), lambda g: _scatter(g, axis, dim))


def reduce_scatter_to_sequence_region(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's shard, along ``dim``, of the sum of all ranks' ``x``; shards are equal."""
    return through(x, lambda x: _scatter(x, axis, dim), lambda g: _join(g, axis, dim))


def through(x: torch.Tensor, forward: Change, backward: Change) -> torch.Tensor:
    """``forward(x)``, whose gradient is what ``backward`` makes of that of its result."""
    return cast(torch.Tensor, _Collective.apply(x, forward, backward))  # type: ignore[no-untyped-call]


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Change, backward: Change) -> torch.Tensor:
        ctx.back = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def _take(x: torch.Tensor, part: slice, dim: int) -> torch.Tensor:
    return x.narrow(dim, part.start, part.stop - part.start).clone(
        memory_format=torch.contiguous_format
    )


def _gather(x: torch.Tensor, axis: Axis, length: int, dim: int) -> torch.Tensor:
    """Shards of unequal length are padded: an all-gather needs one length."""
    counts = [chunk(length, axis.size, index)[1] for index in range(axis.size)]
    dim = dim % x.ndim
    if x.shape[dim] < counts[0]:
        x = F.pad(x, (*[0, 0] * (x.ndim - dim - 1), 0, counts[0] - x.shape[dim]))
    parts = zip(axis.each(x.contiguous()), counts, strict=True)
    return torch.cat([part.narrow(dim, 0, count) for part, count in parts], dim)


def _join(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    return torch.cat(axis.each(x.contiguous()), dim)


def _scatter(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    return axis.sum_of_mine(torch.stack(x.chunk(axis.size, dim)))
