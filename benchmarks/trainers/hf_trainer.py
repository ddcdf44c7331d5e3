"""What the Hugging Face Trainer is told and tells; TRL and LLaMA-Factory train with it as well."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from task import Meter, Task
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedModel,
    TrainerCallback,
)


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


def load_model(todo: Task) -> PreTrainedModel:
    """The model of the task, without an adapter."""
    settings: dict[str, Any] = {"dtype": todo.dtype}
    if todo.bits:
        settings["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=todo.bits == 4,
            load_in_8bit=todo.bits == 8,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    if todo.device == "cuda":
        settings["device_map"] = {"": 0}
    return AutoModelForCausalLM.from_pretrained(todo.model_path, **settings)


def lora(todo: Task) -> LoraConfig:
    """The adapter of the task."""
    return LoraConfig(
        r=todo.rank, lora_alpha=2 * todo.rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )


def with_adapter(model: PreTrainedModel, todo: Task) -> Any:
    """The model that is trained."""
    if todo.method != "lora":
        return model
    if todo.bits:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=todo.recompute)
    return get_peft_model(model, lora(todo))


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
