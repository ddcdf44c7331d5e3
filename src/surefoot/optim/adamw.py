"""AdamW (arXiv:1711.05101), torch's fused one, with its learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .groups import Named, decay_groups
from .schedules import Schedule, ScheduleName

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay; decays matrices only, never biases and norms."""

    learning_rate: float = 5e-5
    """Peak learning rate."""
    schedule: ScheduleName = "cosine"
    """Shape of the learning rate after warm-up; ``wsd`` is warm-up, stable, decay."""
    warmup_ratio: float = 0.0
    """Share of all steps that warm up."""
    warmup_steps: int | None = None
    """Steps that warm up; wins over ``warmup_ratio``."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end, as a share of the peak (not for ``constant``)."""
    decay_ratio: float = 0.1
    """``wsd`` only: share of all steps in the final decay."""
    weight_decay: float = 0.0
    """Decay of matrices per step, times the learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""

    def __post_init__(self) -> None:
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        for name in ("warmup_ratio", "min_lr_ratio", "decay_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {self.warmup_steps}")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay}")
        if self.epsilon <= 0:
            raise ValueError(f"epsilon must be positive, got {self.epsilon}")

    def build(self, named: Named) -> torch.optim.Optimizer:
        """The optimizer over ``named`` parameters; every group carries its parameters'
        ``names``."""
        import torch

        return torch.optim.AdamW(
            decay_groups(named, self.weight_decay),
            lr=self.learning_rate,
            betas=(self.beta1, self.beta2),
            eps=self.epsilon,
            fused=True,
        )

    def schedule_over(self, total_steps: int) -> Schedule:
        """The learning-rate schedule of a run of ``total_steps``."""
        warmup = self.warmup_steps
        if warmup is None:
            warmup = math.ceil(self.warmup_ratio * total_steps)
        return Schedule(
            name=self.schedule,
            total_steps=total_steps,
            warmup_steps=min(warmup, total_steps),
            min_ratio=self.min_lr_ratio,
            decay_steps=math.ceil(self.decay_ratio * total_steps),
        )
