"""The settings that every optimizer has, declared once: the learning rate, its schedule, and how
bfloat16 weights are updated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from .schedules import Schedule, ScheduleName


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """What all optimizers have. An optimizer inherits these fields, and nothing else."""

    is_entrywise: ClassVar[bool] = False
    splits_matrices: ClassVar[bool] = False  # must know which matrices are fused in a parameter

    learning_rate: float = 5e-5
    """Peak learning rate."""
    learning_rates: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Factors of the learning rate for some parameters, by a part of their names:
    ``{embed_tokens: 0.1}``, ``{lora_B: 16}`` (LoRA+, arXiv:2402.12354), ``{layers.0: 0.5}``,
    ``{'*norm': 2}``. A pattern matches one or more parts of a name between its dots."""
    schedule: ScheduleName = "cosine"
    """Shape of the learning rate after warmup. ``wsd`` is warmup-stable-decay with a linear decay,
    ``wsd_cosine`` with a cosine. ``inverse_sqrt`` is 1 over the root of steps / warmup steps."""
    warmup_ratio: float = 0.0
    """Share of all steps used for warmup."""
    warmup_steps: int | None = None
    """Steps of warmup; has precedence over ``warmup_ratio``."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end, as a share of the peak (not for ``constant`` and
    ``inverse_sqrt``)."""
    decay_ratio: float = 0.1
    """``wsd`` and ``wsd_cosine``: share of all steps in the final decay."""
    bf16_weights: Literal["stochastic", "master", "nearest"] = "stochastic"
    """How bfloat16 weights (``model.dtype: bfloat16``) are updated. ``stochastic`` rounds each
    result up or down at random, so that updates are right in the mean. ``master`` updates a float32
    copy, which checkpoints contain. ``nearest`` rounds to the nearest value: updates below 0.2 % of
    a weight are lost."""
    offload_state: bool = False
    """Keep the state in main memory: for each update, that of some parameters at a time is copied
    to the GPU and back. Not for sharded parameters; without effect on a CPU."""


def check_learning_rate(settings: LearningRate) -> None:
    """Raise ``ValueError`` that names an invalid setting."""
    if settings.learning_rate <= 0:
        raise ValueError(f"learning_rate must be positive, got {settings.learning_rate}")
    for pattern, factor in settings.learning_rates.items():
        if factor < 0:
            raise ValueError(f"learning_rates must not be negative, got {factor} for {pattern}")
    for name in ("warmup_ratio", "min_lr_ratio", "decay_ratio"):
        if not 0 <= (share := getattr(settings, name)) <= 1:
            raise ValueError(f"{name} must be between 0 and 1, got {share}")
    if settings.warmup_steps is not None and settings.warmup_steps < 0:
        raise ValueError(f"warmup_steps must not be negative, got {settings.warmup_steps}")


def check_shares(settings: LearningRate, *names: str) -> None:
    """Raise ``ValueError`` if one of these settings is not in [0, 1), or another that all of them
    have makes no sense."""
    for name in names:
        if not 0 <= (share := getattr(settings, name)) < 1:
            raise ValueError(f"{name} must be in [0, 1), got {share}")
    if getattr(settings, "weight_decay", 0.0) < 0:
        raise ValueError(f"weight_decay must not be negative, got {settings.weight_decay}")  # type: ignore[attr-defined]
    for name in ("epsilon", "adamw_epsilon"):
        if getattr(settings, name, 1.0) <= 0:
            raise ValueError(f"{name} must be positive, got {getattr(settings, name)}")


def offloads_state(settings: object) -> bool:
    """Whether the state rests in main memory; an optimizer of one's own may have no such choice."""
    return bool(getattr(settings, "offload_state", False))


def schedule_of(settings: LearningRate, total_steps: int) -> Schedule:
    """The learning-rate schedule of a run of ``total_steps``."""
    warmup = settings.warmup_steps
    if warmup is None:
        warmup = math.ceil(settings.warmup_ratio * total_steps)
    return Schedule(
        name=settings.schedule,
        total_steps=total_steps,
        warmup_steps=min(warmup, total_steps),
        min_ratio=settings.min_lr_ratio,
        decay_steps=math.ceil(settings.decay_ratio * total_steps),
    )
