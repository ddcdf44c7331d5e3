"""Settings of axolotl that depend on several settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .arguments import RefusedError
from .given import GivenArguments, RenamedArguments, RenamingRule
from .trl import PLACE, entry

_READ = {"path", "type", "split", "name", "data_files", "ds_type"}
_TEMPLATES = {None: "auto", "tokenizer_default": "auto", "chatml": "chatml"}


def _method(given: GivenArguments, to: RenamedArguments) -> None:
    kind = given["adapter"]
    for name in ("base_model", "learning_rate", "datasets"):
        if given[name] is None:
            raise RefusedError(name, "is missing")
    to.arguments["learning_rate"] = given["learning_rate"]
    to.arguments["finetuning_type"] = "full" if kind is None else "lora"
    if kind is None:
        return
    linear, modules = given["lora_target_linear"], given["lora_target_modules"]
    if not linear and not modules:
        raise RefusedError("adapter", "needs lora_target_linear: true or lora_target_modules")
    if given["lora_r"] is None or given["lora_alpha"] is None:
        raise RefusedError("adapter", "needs lora_r and lora_alpha")
    to.arguments["lora_target"] = ["all"] if linear else modules
    to.arguments["create_new_adapter"] = False
    is_4 = given["load_in_4bit"]
    if kind == "qlora" and not is_4:
        raise RefusedError("adapter", "qlora needs load_in_4bit: true")
    if is_4 or given["load_in_8bit"]:
        to.arguments["quantization_bit"] = 4 if is_4 else 8


def _data(given: GivenArguments, to: RenamedArguments) -> None:
    to.settings["data.datasets"] = _entries(given["datasets"], "datasets")
    to.settings["data.on_too_long"] = "drop"  # as there
    to.settings["data.packing"] = True
    to.arguments["dataset"] = [PLACE[1]]
    if given["test_datasets"]:
        to.settings["data.eval_datasets"] = _entries(given["test_datasets"], "test_datasets")
        to.arguments["eval_dataset"] = [PLACE[1]]
    elif given["val_set_size"]:
        to.arguments["val_size"] = given["val_set_size"]
    name = given["chat_template"]
    if name not in _TEMPLATES and not str(name).startswith("tokenizer_default_fallback_"):
        raise RefusedError("chat_template", f"{name!r}: write tokenizer_default, the model's own")
    to.settings["data.template"] = _TEMPLATES.get(name, "auto")
    if not given["shuffle_merged_datasets"]:
        raise RefusedError("shuffle_merged_datasets", "the order changes in every epoch; remove it")
    if given["sample_packing"]:
        to.notes.append(
            "sample_packing: a batch there has as many packed rows as it has examples here, so an "
            "epoch has more steps; raise train.global_batch_size if you like"
        )


def _entries(listed: Any, name: str) -> list[object]:
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise RefusedError(name, "expected a list of datasets, each with path and type")
    return [_entry(one, name) for one in listed]


def _entry(one: Mapping[str, Any], name: str) -> object:
    unknown = sorted(one.keys() - _READ)
    if unknown:
        raise RefusedError(
            name, f"{unknown[0]} is not supported; describe the columns in the recipe"
        )
    if one.get("type") != "chat_template":
        message = (
            f"type: {one.get('type')} has a prompt of its own; convert the rows to messages, and "
            "write type: chat_template"
        )
        raise RefusedError(name, message)
    files = one.get("data_files")
    if files is not None and not isinstance(files, str):
        raise RefusedError(name, "data_files: write one file for each dataset")
    return entry(files or str(one["path"]), str(one.get("split") or "train"), one.get("name"))


def _precision(given: GivenArguments, to: RenamedArguments) -> None:
    bf16, fp16 = given["bf16"], bool(given["fp16"])
    is_auto = str(bf16).lower() == "auto"
    if str(bf16).lower() == "full":
        to.arguments["pure_bf16"] = True
        return
    to.arguments["bf16"] = is_auto or str(bf16).lower() == "true"
    to.arguments["fp16"] = fp16 and not to.arguments["bf16"]
    if is_auto:
        to.notes.append("bf16: auto is bf16 here; without a GPU that has it, write fp16: true")
    if given["adapter"] is None and to.arguments["bf16"]:
        to.notes.append("weights are float32 in memory; axolotl keeps them in bfloat16")


def _recomputation(given: GivenArguments, to: RenamedArguments) -> None:
    told = str(given["gradient_checkpointing"]).lower()
    if told not in ("true", "false", "none", "offload"):
        raise RefusedError("gradient_checkpointing", f"{told!r}: write true, false or offload")
    to.arguments["use_unsloth_gc"] = told == "offload"
    to.arguments["disable_gradient_checkpointing"] = told in ("false", "none")


def _steps(given: GivenArguments, to: RenamedArguments) -> None:
    """Warmup, logs and saves, with axolotl's own defaults."""
    steps, ratio = given["warmup_steps"], given["warmup_ratio"]
    if steps is None and ratio is None:
        message = (
            "is not set, so axolotl takes 3 % of all steps, 100 at most; write warmup_steps or "
            "warmup_ratio (0 is for none)"
        )
        raise RefusedError("warmup_steps", message)
    if steps:
        to.arguments["warmup_steps"] = 2 if steps == 1 else steps  # as there
    elif ratio:
        to.arguments["warmup_ratio"] = ratio
    to.arguments["logging_steps"] = given["logging_steps"] or 10
    if not given["save_steps"]:
        per_epoch = given["saves_per_epoch"]
        if per_epoch not in (None, 1):
            raise RefusedError("saves_per_epoch", "write save_steps")
        to.arguments["save_strategy"] = given["save_strategy"] or "epoch"
    if given["eval_steps"] and given["eval_strategy"] is None:
        to.arguments["eval_strategy"] = "steps"
    _report(given, to)


def _report(given: GivenArguments, to: RenamedArguments) -> None:
    """A project of W&B or an experiment of MLflow turns its tracker on, as there."""
    wandb = given["use_wandb"] is not False and (given["use_wandb"] or given["wandb_project"])
    wandb = wandb and given["wandb_mode"] != "disabled"
    experiment = given["mlflow_experiment_name"]
    mlflow = given["use_mlflow"] is not False and (given["use_mlflow"] or experiment)
    names = {"tensorboard": given["use_tensorboard"], "wandb": wandb, "mlflow": mlflow}
    to.arguments["report_to"] = [name for name, is_on in names.items() if is_on] or ["none"]
    if project := (wandb and given["wandb_project"]) or (mlflow and experiment):
        to.arguments["project"] = project
    if wandb and given["wandb_name"]:
        to.arguments["run_name"] = given["wandb_name"]
    if wandb and given["wandb_mode"] == "offline":
        to.settings["train.report_offline"] = True


def _tokens(given: GivenArguments, _to: RenamedArguments) -> None:
    found = given["special_tokens"] or {}
    others = sorted(found.keys() - {"pad_token"}) if isinstance(found, dict) else ["special_tokens"]
    if others:
        message = f"{others[0]}: the tokenizer's own are used; change them in its files"
        raise RefusedError("special_tokens", message)


AXOLOTL_RULES: tuple[tuple[str, RenamingRule], ...] = (
    ("adapter", _method),
    ("datasets", _data),
    ("bf16", _precision),
    ("gradient_checkpointing", _recomputation),
    ("warmup_steps", _steps),
    ("special_tokens", _tokens),
)
