"""The Trainer's arguments that correspond to a recipe. Its checkpoints do not contain them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from ...errors import CheckpointError
from ...optim.optimizer import Optimizer
from ...recipe.recipe import Recipe


def training_arguments(run: Recipe, max_steps: int) -> dict[str, object]:
    """Keywords of ``TrainingArguments`` to resume the run; in the warmup it is one step behind."""
    section = run.train
    found: dict[str, object] = {
        "max_steps": max_steps,
        "per_device_train_batch_size": section.fixed_micro_batch_size,
        "gradient_accumulation_steps": section.gradient_accumulation_steps,
        "max_grad_norm": section.max_grad_norm,
        "seed": section.seed,
        "label_smoothing_factor": run.stage.spec.smoothing,
        "learning_rate": run.optim.learning_rate,
        **_optimizer(run.optim),
        **_schedule(run.optim, max_steps),
    }
    if section.precision in ("bf16", "fp16"):
        found[section.precision] = True
    return found


def group_settings(optim: Optimizer, progress: Mapping[str, Any]) -> list[dict[str, object]]:
    """The two groups of the Trainer's optimizer after this step."""
    made = optim.build([("w", torch.nn.Parameter(torch.zeros(1, 1)))], {})
    if not isinstance(made, torch.optim.AdamW):
        raise CheckpointError(
            f"the run's optimizer is {type(made).__name__}; only AdamW's state can be converted"
        )
    if optim.learning_rates:
        raise CheckpointError(
            "optim.adamw.learning_rates: the Trainer's optimizer has one learning rate for all "
            "parameters, so this state cannot be converted"
        )
    group = {k: v for k, v in made.param_groups[0].items() if k not in ("params", "names")}
    peak = group["lr"]
    factor = optim.schedule_over(progress["max_steps"]).factor(progress["global_step"])
    group |= {"lr": peak * factor, "initial_lr": peak}
    return [group, {**group, "weight_decay": 0.0}]


# what the Trainer calls optimizers whose settings and state mean the same there; AdamW is its usual
_NAMES = {"AdamW": None, "Lion": "lion_32bit", "AdEMAMix": "ademamix", "GaLore": "galore_adamw"}
_NAMES |= {"Apollo": "apollo_adamw", "ScheduleFree": "schedule_free_adamw"}


def _optimizer(optim: Optimizer) -> dict[str, object]:
    found: dict[str, object] = {"weight_decay": optim.weight_decay}
    kind = type(optim).__name__
    if kind in _NAMES:
        if name := _NAMES[kind]:
            found["optim"] = name
        own = {"beta1", "beta2", "epsilon"} & {setting.name for setting in fields(optim)}
        found |= {f"adam_{setting}": getattr(optim, setting) for setting in own}
    return found


def _schedule(optim: Optimizer, max_steps: int) -> dict[str, object]:
    schedule = optim.schedule_over(max_steps)
    name: str = schedule.name
    settings: dict[str, object] = {}
    if name == "constant" and schedule.warmup_steps:
        name = "constant_with_warmup"
    elif name == "cosine" and schedule.min_ratio:
        name, settings = "cosine_with_min_lr", {"min_lr_rate": schedule.min_ratio}
    elif name == "linear" and schedule.min_ratio:
        lowest = optim.learning_rate * schedule.min_ratio
        name, settings = "polynomial", {"lr_end": lowest, "power": 1.0}
    elif name in ("wsd", "wsd_cosine"):
        shape = "linear" if name == "wsd" else "cosine"
        start = max(schedule.warmup_steps, max_steps - schedule.decay_steps)
        settings = {"num_decay_steps": max_steps - start, "decay_type": shape}
        name = "warmup_stable_decay"
        settings["min_lr_ratio"] = schedule.min_ratio
    found: dict[str, object] = {"lr_scheduler_type": name, "warmup_steps": schedule.warmup_steps}
    return found | ({"lr_scheduler_kwargs": settings} if settings else {})
