"""Whose YAML a file is: only MindSpore Transformers' can be converted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...schema import Problem, settings
from ..document import Document
from ..recipe import Recipe

# At least one of these is in every file of MindSpore Transformers that runs anything.
MINDFORMERS = (
    *("run_mode", "runner_config", "runner_wrapper", "parallel_config", "train_dataset"),
    *("load_ckpt_format", "auto_trans_ckpt", "pretrained_model_dir", "use_parallel"),
)
LLAMAFACTORY = {  # the settings of its keys
    "model_name_or_path": "model.path",
    "adapter_name_or_path": "model.adapter",
    "quantization_bit": "model.quantization_bit",
    "finetuning_type": "method",
    "lora_rank": "method.lora.rank",
    "lora_alpha": "method.lora.alpha",
    "lora_dropout": "method.lora.dropout",
    "lora_target": "method.lora.targets",
    "dataset": "data.datasets",
    "dataset_dir": "data.dataset_dir",
    "eval_dataset": "data.eval_datasets",
    "template": "data.template",
    "cutoff_len": "data.cutoff_len",
    "max_samples": "data.max_samples",
    "val_size": "data.val_size",
    "packing": "data.packing",
    "output_dir": "train.output_dir",
    "num_train_epochs": "train.num_epochs",
    "max_steps": "train.max_steps",
    "per_device_train_batch_size": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size: micro batches x accumulation x ranks",
    "logging_steps": "train.log_steps",
    "eval_steps": "train.eval_steps",
    "seed": "train.seed",
    "bf16": "train.precision: bf16",
    "fp16": "train.precision: fp16",
    "save_steps": "checkpoint.save_steps",
    "save_total_limit": "checkpoint.keep",
    "resume_from_checkpoint": "checkpoint.resume",
    "learning_rate": "optim.adamw.learning_rate",
    "lr_scheduler_type": "optim.adamw.schedule",
    "warmup_ratio": "optim.adamw.warmup_ratio",
    "weight_decay": "optim.adamw.weight_decay",
    "stage": "stage",
}


def check_kind(document: Document) -> None:
    """Raises ``RecipeError``: the file is not MindSpore Transformers', with what it is instead."""
    told = document.data
    if not isinstance(told, dict) or any(key in told for key in MINDFORMERS):
        return  # what is no mapping is reported when its keys are read
    if problems := list(_problems(told)):
        raise document.error(problems)


def _problems(told: Mapping[str, Any]) -> Iterator[Problem]:
    if "model_name_or_path" in told:
        yield Problem(
            (),
            "this is LLaMA-Factory's YAML, and only MindSpore Transformers' is converted; write a "
            "recipe with these settings (`surefoot recipe show RECIPE --docs` explains them)",
        )
        for key in told:
            if key in LLAMAFACTORY:
                yield Problem((key,), f"is {LLAMAFACTORY[key]} in a recipe")
    elif {"model", "data", "train"} & told.keys() <= settings(Recipe).keys() and "stage" in told:
        yield Problem(
            (), "this is a recipe already; `surefoot recipe show` prints all its settings"
        )
    else:
        known = ", ".join(MINDFORMERS[:5])
        yield Problem((), f"not MindSpore Transformers' YAML: it has none of the keys {known}")
