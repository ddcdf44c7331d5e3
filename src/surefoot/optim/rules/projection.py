"""Gradients projected to a low rank, and Adam's moments of them (shapes: ``projected_state``)."""

from __future__ import annotations

import torch

from ..state_tensor import projector_shape, small_dim
from .rule_optimizer import Update
from .sharded import complete, part_of


def project(update: Update, projector: torch.Tensor) -> torch.Tensor:
    """The gradient in low rank, from this rank's part of the ``projector``."""
    shape = tuple(update.parameter.shape)
    is_right = shape[-2] >= shape[-1]
    grad = update.grad
    low = grad @ projector.mT if is_right else projector.mT @ grad
    return update.add_over_shards(low, {small_dim(shape)})


def project_back(low: torch.Tensor, projector: torch.Tensor, update: Update) -> torch.Tensor:
    """This rank's part of a matrix from its form in low rank."""
    shape = update.parameter.shape
    return low @ projector if shape[-2] >= shape[-1] else projector @ low


def random_projector(parameter: torch.Tensor, rank: int, seed: int) -> torch.Tensor:
    """This rank's part of a projector with normal entries of variance 1/rank; one for all experts.
    The CPU draws it, so that it is the same for every device and mesh."""
    *batch, m, n = parameter.shape
    drawn = torch.Generator().manual_seed(seed)
    made = projector_shape((*[1] * len(batch), m, n), rank)
    full = torch.randn(made, generator=drawn) / min(rank, m, n) ** 0.5
    full = full.to(parameter.device, parameter.dtype)
    return part_of(full, parameter, {small_dim(tuple(parameter.shape))})


def singular_vectors(update: Update, rank: int) -> torch.Tensor:
    """This rank's part of a projector of the gradient's first singular vectors."""
    own = update.parameter
    full = complete(update.grad, own)
    is_narrow = full.dtype.itemsize < 4
    left, _, right = torch.linalg.svd(full.float() if is_narrow else full, full_matrices=False)
    is_right = own.shape[-2] >= own.shape[-1]
    found = right[..., :rank, :] if is_right else left[..., :rank]
    kept = {*range(own.ndim - 2), small_dim(tuple(own.shape))}
    return part_of(found.contiguous(), own, kept)


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
