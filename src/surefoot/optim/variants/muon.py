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

from ..groups import Named, parameter_groups
from ..learning_rate import LearningRate, check_learning_rate, check_shares, schedule_of
from ..optimizer import LIKE_PARAMETER, SCALAR, StateTensor, of_matrices, of_others
from ..parameter_kind import ParameterKinds, layout_of
from ..rules import lazy_names as rules

if TYPE_CHECKING:
    import torch

    from ..rules.rule_optimizer import Update


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

    def build(self, named: Named, layouts: ParameterKinds | None = None) -> torch.optim.Optimizer:
        """The optimizer over ``named`` parameters; every group carries their ``names``."""
        known = layouts or {}
        rate = self.adamw_learning_rate or self.learning_rate

        def base_rate(name: str, num_dims: int) -> float:
            is_matrix = layout_of(name, num_dims, known).is_matrix
            return self.learning_rate if is_matrix else rate

        groups = parameter_groups(named, self, self.weight_decay, base_rate)
        return rules.build(self, groups, self.update, layouts)

    def update(self, update: Update) -> None:
        """Update one parameter."""
        if not update.layout.is_matrix:
            rules.adamw(update, self.adamw_beta1, self.adamw_beta2, self.adamw_epsilon)
            return
        grad, mean = update.grad, update.tensor("momentum_buffer")
        mean.lerp_(grad, 1 - self.momentum)
        direction = grad.lerp(mean, self.momentum) if self.nesterov else mean
        full = rules.complete(direction.to(rules.ns_dtype()), update.parameter)
        made = rules.orthogonalized(full, update.layout, self.ns_steps, self.scale).to(grad.dtype)
        update.decay()
        update.value.add_(rules.part_of(made, update.parameter), alpha=-update.rate)

    def scale(self, outputs: int, inputs: int) -> float:
        """The factor of the learning rate of a matrix."""
        if self.lr_scale == "original":
            return math.sqrt(max(1, outputs / inputs))
        return 0.2 * math.sqrt(max(outputs, inputs))

    def trainer_arguments(self) -> dict[str, object]:
        """The Trainer has no Muon."""
        return {"weight_decay": self.weight_decay}
