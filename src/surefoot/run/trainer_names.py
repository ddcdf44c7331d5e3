"""The settings of a recipe under the names of the Hugging Face Trainer's arguments, as callbacks
that are written for it read them."""

from __future__ import annotations

from ..checkpoint.section import CheckpointSection
from ..errors import RecipeError
from ..model.loading import device
from ..model.section import ModelSection
from ..optim.optimizer import Optimizer
from ..parallel.section import launched
from ..training.arguments import MEMBERS
from ..training.section import TrainSection
from ..training.views import Shown


def argument_values(
    model: ModelSection, train: TrainSection, optim: Optimizer, saves: CheckpointSection
) -> dict[str, Shown]:
    """The value of each argument, and the setting that it is. Raises ``RecipeError`` if
    ``train.extra`` has one of their names."""
    metric = train.metric_for_best_model
    is_fixed, folder = train.micro_batch_size != "auto", str(train.folder)
    size = train.fixed_micro_batch_size if is_fixed else None
    warmup = optim.warmup_ratio if optim.warmup_steps is None else 0.0
    found: dict[str, tuple[object, str]] = {
        "output_dir": (folder, "train.output_dir"),
        "logging_dir": (f"{folder}/tensorboard", "train.output_dir"),
        "run_name": (train.run_name or train.folder.name, "train.run_name"),
        "seed": (train.seed, "train.seed"),
        "data_seed": (train.seed, "train.seed"),
        "num_train_epochs": (train.num_epochs, "train.num_epochs"),
        "max_steps": (-1 if train.max_steps is None else train.max_steps, "train.max_steps"),
        "per_device_train_batch_size": (size, "train.micro_batch_size"),
        "per_device_eval_batch_size": (size, "train.micro_batch_size"),
        "train_batch_size": (size, "train.micro_batch_size"),
        "eval_batch_size": (size, "train.micro_batch_size"),
        "gradient_accumulation_steps": (
            train.gradient_accumulation_steps if is_fixed else None,
            "train.global_batch_size",
        ),
        "learning_rate": (optim.learning_rate, "optim.learning_rate"),
        "weight_decay": (optim.weight_decay, "optim.weight_decay"),
        "lr_scheduler_type": (optim.schedule, "optim.schedule"),
        "warmup_steps": (optim.warmup_steps or 0, "optim.warmup_steps"),
        "warmup_ratio": (warmup, "optim.warmup_ratio"),
        "max_grad_norm": (train.max_grad_norm, "train.max_grad_norm"),
        "bf16": (train.precision == "bf16", "train.precision"),
        "fp16": (train.precision == "fp16", "train.precision"),
        "gradient_checkpointing": (
            model.gradient_checkpointing,
            "model.gradient_checkpointing",
        ),
        "logging_steps": (train.log_steps or 0, "train.log_steps"),
        "logging_strategy": (_strategy(train.log_steps, train.log_epoch), "train.log_steps"),
        "eval_steps": (train.eval_steps, "train.eval_steps"),
        "eval_strategy": (_strategy(train.eval_steps, train.eval_epoch), "train.eval_steps"),
        "save_steps": (saves.save_steps or 0, "checkpoint.save_steps"),
        "save_strategy": (_strategy(saves.save_steps, saves.save_epoch), "checkpoint.save_steps"),
        "save_total_limit": (saves.keep, "checkpoint.keep"),
        "metric_for_best_model": (metric, "train.metric_for_best_model"),
        "greater_is_better": (train.is_greater_better, "train.greater_is_better"),
        "load_best_model_at_end": (train.load_best_model_at_end, "train.load_best_model_at_end"),
        "report_to": (list(train.report_to), "train.report_to"),
    }
    rank, world_size, local_rank = launched() or (0, 1, 0)
    place = {
        "process_index": rank,
        "local_process_index": local_rank,
        "local_rank": local_rank,
        "world_size": world_size,
        "device": device(),
        "should_save": rank == 0,
        "should_log": rank == 0,
    }
    for name, value in train.extra.items():
        if name in found or name in place or name in MEMBERS:
            raise RecipeError(
                f"train.extra.{name}: args.{name} exists already; choose another name"
            )
        found[name] = value, f"train.extra.{name}"
    here = {name: Shown(value, None) for name, value in place.items()}
    return here | {name: Shown(value, setting) for name, (value, setting) in found.items()}


def _strategy(steps: int | None, epoch: bool) -> str:
    if steps is not None:
        return "steps"
    return "epoch" if epoch else "no"
