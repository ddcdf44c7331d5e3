"""What the Hugging Face Trainer is told and tells; TRL and LLaMA-Factory train with it as well."""

from __future__ import annotations

from typing import Any

from task import Meter, Task
from transformers import TrainerCallback


def arguments(todo: Task) -> dict[str, Any]:
    """The settings that make it the same run for all."""
    return {
        "output_dir": todo.output,
        "max_steps": todo.steps,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": todo.device == "cpu",
        "bf16": todo.device == "cuda",
        "disable_tqdm": True,
    }


class Watch(TrainerCallback):
    """Tells the meter what happens."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
        """The model is there."""
        self.meter.watch(model)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """A step begins."""
        self.meter.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """A step has ended."""
        self.meter.end()

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        """Note the loss."""
        if "loss" in logs:
            self.meter.losses.append(float(logs["loss"]))
