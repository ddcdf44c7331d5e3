"""The norm of sharded gradients: each rank sums its own shards, then one all-reduce.

DTensor would use one all-reduce per mesh axis, log a warning, and spend most of the first step on
planning it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate


def global_norm(
    gradients: Sequence[torch.Tensor],
    totals: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
) -> torch.Tensor:
    """The Euclidean norm of all elements of all ``gradients``, which are on ``device``.

    ``totals`` sums over all ranks. Replicated values count once. The sum is float64 on every rank,
    even without gradients, so all ranks clip with the same bits.
    """
    if not gradients:  # here; another stage of a pipeline may have some
        return totals(torch.zeros(1, dtype=torch.float64, device=device)).sqrt()[0]
    if not any(isinstance(gradient, DTensor) for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    by_copies: dict[int, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_copies.setdefault(_copies(gradient), []).append(local(gradient))
    shares = [
        torch.stack(torch._foreach_norm(here)).double().square().sum() / copies
        for copies, here in by_copies.items()
    ]
    return totals(torch.stack(shares).sum()[None]).sqrt()[0]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of ``tensor``, as a plain tensor that shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copies(gradient: torch.Tensor) -> int:
    """The number of ranks with the same shard."""
    assert isinstance(gradient, DTensor)
    axes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in axes if isinstance(placement, Replicate))
