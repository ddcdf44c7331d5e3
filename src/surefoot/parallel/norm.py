"""The norm of gradients that are spread over processes: each adds up its own, then one sum.

DTensor would do the same in a sum for each axis of the mesh, warn of it, and think for most of the
first step about how.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate


def total_norm(
    gradients: Sequence[torch.Tensor], totals: Callable[[Sequence[float]], list[float]]
) -> torch.Tensor:
    """The Euclidean norm of all elements of all ``gradients`` together.

    ``totals`` sums over all processes. What lies in several of them counts once. The sum is of
    float64 whatever gradients are here, or none: all processes clip by the same bits.
    """
    if not gradients:  # here; another stage of a pipeline may have some
        return torch.tensor(math.sqrt(*totals([0.0])), dtype=torch.float64)
    if not any(isinstance(gradient, DTensor) for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    here = [local(gradient) for gradient in gradients]
    squares = torch.stack(torch._foreach_norm(here)).double().square().tolist()
    shares = (square / _copies(g) for square, g in zip(squares, gradients, strict=True))
    (total,) = totals([math.fsum(shares)])
    return torch.tensor(math.sqrt(total), dtype=torch.float64, device=here[0].device)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of ``tensor`` is in this process, as a plain tensor that shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copies(gradient: torch.Tensor) -> int:
    """How many processes hold the same part."""
    assert isinstance(gradient, DTensor)
    axes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in axes if isinstance(placement, Replicate))
