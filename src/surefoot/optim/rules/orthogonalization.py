"""Orthogonalize matrices by Newton-Schulz iterations, as torch.optim.Muon does."""

from __future__ import annotations

from collections.abc import Callable

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
    for rows in kind.slices(by_outputs.shape[-2]):
        found = newton_schulz(by_outputs[..., rows, :], steps)
        made[..., rows, :] = found.to(wide) * scale(found.shape[-2], found.shape[-1])
    if kind.is_transposed:
        made = made.mT
    return made


def newton_schulz(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """The nearest semi-orthogonal matrix, roughly: singular values end between 0.7 and 1.2. A
    leading dimension is a batch."""
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.to(NS_DTYPE)
    if is_tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    if is_tall:
        x = x.mT
    return x
