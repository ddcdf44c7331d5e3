"""Muon (Jordan et al. 2024; arXiv:2502.16982): orthogonalized momentum for matrices inside layers,
AdamW for everything else.

Embeddings, head, norms, biases, routers and adapters are AdamW's. Matrices that are fused in one
parameter are orthogonalized one by one, and so are those of experts, in a batch. A sharded matrix
is gathered, in bfloat16, by one of the ranks, which computes it and sends the others their parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from ...schema import must
from .._rules import modules as rules
from ..optimizer import Optimizer
from ..state_tensor import (
    LIKE_PARAMETER,
    SCALAR,
    ParameterKind,
    StateTensor,
    of_matrices,
    of_others,
)

if TYPE_CHECKING:
    import torch

    from .._rules.rule_optimizer import Update


@dataclass(frozen=True, kw_only=True)
class Muon(Optimizer):
    """Orthogonalized momentum for the matrices inside layers; AdamW for embeddings, head, norms,
    biases, routers and adapters."""

    state_tensors: ClassVar[Mapping[str, StateTensor]] = {
        "step": SCALAR,
        "momentum_buffer": of_matrices(LIKE_PARAMETER),
        "exp_avg": of_others(LIKE_PARAMETER),
        "exp_avg_sq": of_others(LIKE_PARAMETER),
    }
    splits_matrices: ClassVar[bool] = True

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
        super().__post_init__()
        must(self, "be in [0, 1)", "momentum", "adamw_beta1", "adamw_beta2")
        must(self, "be positive", "adamw_epsilon", "adamw_learning_rate")
        if not 1 <= self.ns_steps < 100:
            raise ValueError(f"ns_steps must be from 1 to 99, got {self.ns_steps}")

    def rate_of(self, kind: ParameterKind) -> float:
        """AdamW's parameters may have a learning rate of their own."""
        rate = self.adamw_learning_rate
        return self.learning_rate if kind.is_matrix or rate is None else rate

    def update_all(self, updates: Sequence[Update]) -> None:
        """Update all parameters."""
        for update in updates:
            if not update.layout.is_matrix:
                update.adamw(self.adamw_beta1, self.adamw_beta2, self.adamw_epsilon)
        matrices = [update for update in updates if update.layout.is_matrix]
        for batch in rules.orthogonalization.batches(matrices):
            self.update_matrices(batch)

    def update_matrices(self, updates: Sequence[Update]) -> None:
        """Update some matrices, each of which is orthogonalized by one of the ranks."""

        def orthogonalized(number: int, full: torch.Tensor) -> torch.Tensor:
            kind = updates[number].layout
            return rules.orthogonalization.orthogonalized(full, kind, self.ns_steps, self.scale)

        parameters = [update.parameter for update in updates]
        parts = [self.direction(update) for update in updates]
        changes = rules.orthogonalization.on_owners(parts, parameters, orthogonalized)
        for update, change in zip(updates, changes, strict=True):
            update.decay()
            update.value.add_(change, alpha=-update.rate)

    def direction(self, update: Update) -> torch.Tensor:
        """This rank's part of the momentum that is orthogonalized."""
        # In the order of torch.optim.Muon's own operations: the tests compare every weight with it.
        grad, mean = update.grad, update.tensor("momentum_buffer")
        mean.lerp_(grad, 1 - self.momentum)
        direction = grad.lerp(mean, self.momentum) if self.nesterov else mean
        return direction.to(rules.orthogonalization.NS_DTYPE)

    def scale(self, outputs: int, inputs: int) -> float:
        """The factor of the learning rate of a matrix."""
        if self.lr_scale == "original":
            return math.sqrt(max(1, outputs / inputs))
        return 0.2 * math.sqrt(max(outputs, inputs))
