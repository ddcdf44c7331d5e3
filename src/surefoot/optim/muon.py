"""Muon (Jordan et al. 2024; arXiv:2502.16982): orthogonalized momentum for matrices inside layers,
AdamW for everything else.

Embeddings, head, norms, biases, routers and adapters are AdamW's. Matrices that are fused in one
parameter are orthogonalized one by one, and so are those of experts, in a batch. A sharded matrix
is gathered once, in bfloat16, and every rank computes the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from .groups import Named, parameter_groups
from .layout import Layout, Layouts, layout_of
from .learning_rate import LearningRate, check_learning_rate, check_shares, schedule_of
from .optimizer import LIKE_PARAMETER, SCALAR, StateTensor, of_matrices, of_others

if TYPE_CHECKING:
    import torch

    from .rules.rule import Update

NS_DTYPE = "bfloat16"  # of the Newton-Schulz iteration, as in torch.optim.Muon


@dataclass(frozen=True, kw_only=True)
class Muon(LearningRate):
    """Orthogonalized momentum for the matrices inside layers; AdamW for embeddings, head, norms,
    biases, routers and adapters."""

    state_tensors: ClassVar[Mapping[str, StateTensor]] = {
        "step": SCALAR,
        "momentum_buffer": of_matrices(LIKE_PARAMETER),
        "exp_avg": of_others(LIKE_PARAMETER),
        "exp_avg_sq": of_others(LIKE_PARAMETER),
    }

    schedule_over = schedule_of

    weight_decay: float = 0.0
    """Decay of matrices per step, times the learning rate."""
    momentum: float = 0.95
    """Decay of the momentum of matrices."""
    nesterov: bool = True
    """Nesterov's momentum."""
    ns_steps: int = 5
    """Newton-Schulz iterations that orthogonalize the momentum of a matrix."""
    lr_scale: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """Factor of the learning rate of an m x n matrix: ``match_rms_adamw`` is 0.2 sqrt(max(m, n)),
    so that AdamW's learning rates fit (arXiv:2502.16982); ``original`` is sqrt(max(1, m/n)), which
    needs rates near 0.02."""
    adamw_learning_rate: float | None = None
    """Peak learning rate of AdamW's parameters. Unset: ``learning_rate``."""
    adamw_beta1: float = 0.9
    """Decay of the first moment of AdamW's parameters."""
    adamw_beta2: float = 0.999
    """Decay of the second moment of AdamW's parameters."""
    adamw_epsilon: float = 1e-8
    """Added to the root of the second moment of AdamW's parameters."""

    def __post_init__(self) -> None:
        check_learning_rate(self)
        check_shares(self, "momentum", "adamw_beta1", "adamw_beta2")
        if not 1 <= self.ns_steps < 100:
            raise ValueError(f"ns_steps must be from 1 to 99, got {self.ns_steps}")
        if self.adamw_learning_rate is not None and self.adamw_learning_rate <= 0:
            raise ValueError(
                f"adamw_learning_rate must be positive, got {self.adamw_learning_rate}"
            )

    def build(self, named: Named, layouts: Layouts | None = None) -> torch.optim.Optimizer:
        """The optimizer over ``named`` parameters; every group carries their ``names``."""
        from .rules.rule import Rule

        known = layouts or {}
        rate = self.adamw_learning_rate or self.learning_rate

        def base_rate(name: str, num_dims: int) -> float:
            is_matrix = layout_of(name, num_dims, known).is_matrix
            return self.learning_rate if is_matrix else rate

        groups = parameter_groups(named, self, self.weight_decay, base_rate)
        return Rule(groups, self.update, self.state_tensors, known, self.learning_rate)

    def update(self, update: Update) -> None:
        """Update one parameter."""
        from .rules.rule import adamw
        from .rules.sharded import complete, part_of

        if not update.layout.is_matrix:
            adamw(update, self.adamw_beta1, self.adamw_beta2, self.adamw_epsilon)
            return
        grad, mean = update.grad, update.tensor("momentum_buffer")
        mean.lerp_(grad, 1 - self.momentum)
        direction = grad.lerp(mean, self.momentum) if self.nesterov else mean
        full = complete(direction.to(_dtype()), update.parameter)
        made = self.orthogonalized(full, update.layout).to(grad.dtype)
        update.decay()
        update.value.add_(part_of(made, update.parameter), alpha=-update.rate)

    def orthogonalized(self, full: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The matrices of a parameter, each orthogonalized and scaled."""
        import torch

        by_outputs = full.mT if layout.is_transposed else full  # (experts,) outputs, inputs
        wide = torch.promote_types(_dtype(), torch.float32)
        made = torch.empty_like(by_outputs, dtype=wide)
        for rows in layout.slices(by_outputs.shape[-2]):
            found = newton_schulz(by_outputs[..., rows, :], self.ns_steps)
            made[..., rows, :] = found.to(wide) * self.scale(*found.shape[-2:])
        found_all: torch.Tensor = made.mT if layout.is_transposed else made
        return found_all

    def scale(self, outputs: int, inputs: int) -> float:
        """The factor of the learning rate of a matrix."""
        if self.lr_scale == "original":
            return math.sqrt(max(1, outputs / inputs))
        return 0.2 * math.sqrt(max(outputs, inputs))

    def trainer_arguments(self) -> dict[str, object]:
        """The Trainer has no Muon."""
        return {"weight_decay": self.weight_decay}


def newton_schulz(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """The nearest semi-orthogonal matrix, roughly: singular values end between 0.7 and 1.2. As in
    torch.optim.Muon; a leading dimension is a batch."""
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.to(_dtype())
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if is_tall else x


def _dtype() -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, NS_DTYPE)
    return found
