"""Gradients projected to a low rank, with Adam's moments of them: what GaLore and APOLLO have in
common. A matrix [m, n] is projected along its smaller dimension, so the projector multiplies it
from the right if m >= n.

A sharded gradient is projected in its parts: each rank multiplies what it has with its part of the
projector, and the products are summed. Only ``singular_vectors`` need the full gradient.
"""

from __future__ import annotations

import torch

from ...batch import sent
from ..state_tensor import projector_shape, small_dim
from .rule_optimizer import Update
from .sharded import complete, part_of


def project(update: Update, projector: torch.Tensor) -> torch.Tensor:
    """The gradient in low rank, from this rank's part of the ``projector``."""
    shape, grad = tuple(update.parameter.shape), update.grad
    low = grad @ projector.mT if shape[-2] >= shape[-1] else projector.mT @ grad
    return update.add_over_shards(low, {small_dim(shape)})


def project_back(low: torch.Tensor, projector: torch.Tensor, update: Update) -> torch.Tensor:
    """This rank's part of a matrix from its form in low rank."""
    shape = update.parameter.shape
    return low @ projector if shape[-2] >= shape[-1] else projector @ low


def random_projector(parameter: torch.Tensor, rank: int, seed: int) -> torch.Tensor:
    """This rank's part of a projector with normal entries of variance 1/rank; one for all experts.
    The CPU draws it, so that it is the same for every device and mesh."""
    *experts, m, n = parameter.shape
    generator = torch.Generator().manual_seed(seed)
    full_shape = projector_shape((*[1] * len(experts), m, n), rank)
    full = torch.randn(full_shape, generator=generator) / min(rank, m, n) ** 0.5
    full = sent(full.to(parameter.dtype), parameter.device)
    return part_of(full, parameter, {small_dim(tuple(parameter.shape))})


def singular_vectors(update: Update, rank: int) -> torch.Tensor:
    """This rank's part of a projector of the gradient's first singular vectors."""
    parameter = update.parameter
    full = complete(update.grad, parameter)
    if full.dtype.itemsize < 4:  # torch decomposes no matrix in 16 bits
        full = full.float()
    left, _, right = torch.linalg.svd(full, full_matrices=False)
    is_right = parameter.shape[-2] >= parameter.shape[-1]
    vectors = right[..., :rank, :] if is_right else left[..., :rank]
    sharded_dims = {*range(parameter.ndim - 2), small_dim(tuple(parameter.shape))}
    return part_of(vectors.contiguous(), parameter, sharded_dims)


def adam_direction(
    update: Update, low: torch.Tensor, beta1: float, beta2: float, epsilon: float
) -> torch.Tensor:
    """Adam's direction of ``low``, without bias correction."""
    mean, square = update.tensor("low_rank_avg"), update.tensor("low_rank_avg_sq")
    mean.lerp_(low, 1 - beta1)
    square.mul_(beta2).addcmul_(low, low, value=1 - beta2)
    return mean / square.sqrt().add_(epsilon)


def corrected_rate(update: Update, beta1: float, beta2: float) -> float:
    """The learning rate with Adam's bias correction."""
    correction: float = (1 - beta2**update.number) ** 0.5 / (1 - beta1**update.number)
    return update.rate * correction
