"""Orthogonalize matrices by Newton-Schulz iterations, as torch.optim.Muon does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from ..parameter_kind import ParameterKind

NS_DTYPE = torch.bfloat16  # of the iteration, as in torch.optim.Muon


def ns_dtype() -> torch.dtype:
    """The type of the iteration, in which a sharded matrix is gathered."""
    return NS_DTYPE


def orthogonalized(
    full: torch.Tensor, kind: ParameterKind, steps: int, scale: Callable[[int, int], float]
) -> torch.Tensor:
    """The matrices of a parameter, each orthogonalized and multiplied by its ``scale`` of outputs
    and inputs."""
    by_outputs = full.mT if kind.is_transposed else full  # (experts,) outputs, inputs
    wide = torch.promote_types(NS_DTYPE, torch.float32)
    made = torch.empty_like(by_outputs, dtype=wide)
    for matrix, into in zip(kind.matrices(by_outputs), kind.matrices(made), strict=True):
        found = newton_schulz(matrix.flatten(-3, -2), steps)
        factor = scale(found.shape[-2], found.shape[-1])
        into.copy_(torch.unflatten(found, -2, (kind.num_groups, -1))).mul_(factor)
    return made.mT if kind.is_transposed else made


def cost(shape: Sequence[int]) -> float:
    """What a parameter of this shape costs, as products of numbers."""
    *batch, m, n = shape
    return prod(batch) * float(min(m, n)) ** 2 * max(m, n)


def newton_schulz(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """The nearest semi-orthogonal matrix, roughly: singular values end between 0.7 and 1.2. A
    leading dimension is a batch."""
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x: torch.Tensor = matrix.to(NS_DTYPE)
    if is_tall:
        x = x.mT
    x = torch.div(x, torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7))
    product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = product(x, product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
