"""TRL's trainers, axolotl and transformers' Trainer: their rules, of which each makes settings of a
recipe, or LLaMA-Factory's arguments, by names without a dot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .arguments import TRAINERS, TRANSFORMERS, RefusedError
from .rules import GivenArguments, Program, Rule, Rules, Settings

_PLACE = "DATASET"  # in LLaMA-Factory's arguments, where the settings have the dataset


def _dataset(arguments: GivenArguments) -> Settings:
    if not arguments["dataset_name"]:
        return {}
    settings: Settings = {"data.datasets": [_hub_entry(arguments, "train")], "dataset": [_PLACE]}
    if arguments["eval_strategy"] not in (None, "no"):
        settings["data.eval_datasets"] = [_hub_entry(arguments, "test")]
        settings["eval_dataset"] = [_PLACE]
    return settings


def _hub_entry(arguments: GivenArguments, kind: str) -> object:
    split = arguments[f"dataset_{kind}_split"]
    return _entry(arguments["dataset_name"], split, arguments["dataset_config"])


def _entry(place: str, split: str, subset: str | None) -> object:
    """A dataset on the hub or of a folder, as an entry of a recipe."""
    # A path that does not exist (yet) is known by how it begins.
    is_path = Path(place).expanduser().exists() or place[:1] in "./~"
    source = {"file_name": place} if is_path else {"hf_hub_url": place}
    entry: dict[str, object] = {"name": f"{Path(place).name}_{split}".replace(".", "_"), **source}
    if subset is not None:
        entry["subset"] = subset
    return entry | ({} if is_path and Path(place).is_file() else {"split": split})


def _preference_losses(arguments: GivenArguments) -> Settings:
    names, weights = arguments["loss_type"], arguments["loss_weights"]
    supported = [name.strip() for name in arguments.table["loss_type"].says.split(",")]
    for name in names:
        if name not in ("sft", *supported):
            message = f"{name!r} is not supported; write one of {', '.join(supported)}"
            raise RefusedError("loss_type", message)
    settings: Settings = {}
    if len(names) > 1 or weights:
        weights = [1.0] * len(names) if weights is None else weights
        if len(weights) != len(names):
            raise RefusedError("loss_weights", f"expected {len(names)} numbers, got {len(weights)}")
        losses = dict(zip(names, map(float, weights), strict=True))
        if "sft" in losses:
            settings["stage.dpo.sft_weight"] = losses.pop("sft")
        settings["stage.dpo.losses"] = losses
    elif names == ["sft"]:
        raise RefusedError(
            "loss_type", "sft alone is supervised fine-tuning: convert it with trl-sft"
        )
    else:
        settings["stage.dpo.loss_type"] = names[0]
    if arguments["smooths_labels"]:
        settings["stage.dpo.label_smoothing"] = arguments["label_smoothing"]
    return settings


def _reward_model(arguments: GivenArguments) -> Settings:
    path = arguments["reward_model_name_or_path"]
    return {} if path is None else {"stage.grpo.reward": [{"reward_model": {"path": path}}]}


def _windows(arguments: GivenArguments) -> Settings:
    """A global batch here counts prompts; a batch there, responses."""
    size, group = arguments["per_device_train_batch_size"], arguments["num_generations"]
    accumulation = arguments["gradient_accumulation_steps"]
    steps = arguments["steps_per_generation"]
    if min(size, group, accumulation) < 1:
        return {}  # which is refused
    steps = accumulation if steps is None else steps
    if steps % accumulation:
        message = f"must be a multiple of gradient_accumulation_steps = {accumulation}"
        raise RefusedError("steps_per_generation", message)
    if size * steps % group:
        message = f"the {size * steps} responses of a window are no multiple of {group}"
        raise RefusedError("num_generations", message)
    return {
        "stage.grpo.mini_batches": steps // accumulation,
        # the responses of a rank in a window, as the batch of LLaMA-Factory's rule
        "per_device_train_batch_size": size * steps // group,
        "gradient_accumulation_steps": 1,
        # it changes no result, and a global batch, of prompts, is a multiple of it
        "train.micro_batch_size": math.gcd(size, size * steps // group),
    }


# axolotl

_READ = {"path", "type", "split", "name", "data_files", "ds_type"}


def _axolotl_data(arguments: GivenArguments) -> Settings:
    settings: Settings = {}
    for name, setting in (("datasets", "datasets"), ("test_datasets", "eval_datasets")):
        if arguments[name]:
            settings[f"data.{setting}"] = _axolotl_entries(arguments, name)
    template = str(arguments["chat_template"] or "chatml")
    if template != "chatml" and not template.startswith("tokenizer_default"):
        message = f"{template!r}: write tokenizer_default, the model's own"
        raise RefusedError("chat_template", message)
    return settings


def _axolotl_entries(arguments: GivenArguments, name: str) -> list[object]:
    datasets = arguments[name]
    if not isinstance(datasets, list) or not all(isinstance(entry, dict) for entry in datasets):
        raise RefusedError(name, "expected a list of datasets, each with path and type")
    return [_axolotl_entry(dataset, name) for dataset in datasets]


def _axolotl_entry(dataset: Mapping[str, Any], name: str) -> object:
    if unknown := sorted(dataset.keys() - _READ):
        raise RefusedError(
            name, f"{unknown[0]} is not supported; describe the columns in the recipe"
        )
    if dataset.get("type") != "chat_template":
        message = (
            f"type: {dataset.get('type')} has a prompt of its own; convert the rows to messages, "
            "and write type: chat_template"
        )
        raise RefusedError(name, message)
    file = dataset.get("data_files")
    if file is not None and not isinstance(file, str):
        raise RefusedError(name, "data_files: write one file for each dataset")
    split = str(dataset.get("split") or "train")
    return _entry(file or str(dataset["path"]), split, dataset.get("name"))


def _axolotl_trackers(arguments: GivenArguments) -> Settings:
    """A project of W&B or an experiment of MLflow turns its tracker on, as there."""
    project, experiment = arguments["wandb_project"], arguments["mlflow_experiment_name"]
    wandb = arguments["use_wandb"] is not False and (arguments["use_wandb"] or project)
    wandb = wandb and arguments["wandb_mode"] != "disabled"
    mlflow = arguments["use_mlflow"] is not False and (arguments["use_mlflow"] or experiment)
    trackers = {"tensorboard": arguments["use_tensorboard"], "wandb": wandb, "mlflow": mlflow}
    settings: Settings = {
        "report_to": [name for name, is_on in trackers.items() if is_on] or ["none"]
    }
    if chosen := (wandb and project) or (mlflow and experiment):
        settings["project"] = chosen
    if wandb and arguments["wandb_name"]:
        settings["run_name"] = arguments["wandb_name"]
    if wandb and arguments["wandb_mode"] == "offline":
        settings["train.report_offline"] = True
    return settings


def _axolotl_tokens(arguments: GivenArguments) -> Settings:
    tokens = arguments["special_tokens"] or {}
    others = sorted(tokens.keys() - {"pad_token"}) if isinstance(tokens, dict) else [str(tokens)]
    if others:
        message = f"{others[0]}: the tokenizer's own are used; change them in its files"
        raise RefusedError("special_tokens", message)
    return {}


def _trl(name: str, title: str, *functions: tuple[str, Rule], **options: Any) -> Program:
    has_length = name != "trl-grpo"
    names = ("transformers", "trl", *(["trl-length"] if has_length else []), name)
    shared = TRAINERS["TRL's ModelConfig, ScriptArguments and DatasetMixtureConfig"]
    arguments = {**TRANSFORMERS, **shared, **TRAINERS[title]}
    rules = Rules(*names, functions=(("dataset_name", _dataset), *functions))
    return Program(title, arguments, rules, truncates=has_length, **options)


_OWN: Mapping[str, Any] = {"has_own_stage": True, "without_dropout": True}
PROGRAMS = {
    "trl-sft": _trl("trl-sft", "TRL's SFTConfig"),
    "trl-dpo": _trl(
        *("trl-dpo", "TRL's DPOConfig", ("loss_type", _preference_losses)), stage="dpo", **_OWN
    ),
    "trl-kto": _trl("trl-kto", "TRL's KTOConfig", stage="kto", **_OWN),
    "trl-reward": _trl("trl-reward", "TRL's RewardConfig", stage="rm", **_OWN),
    "trl-grpo": _trl(
        *("trl-grpo", "TRL's GRPOConfig", ("reward_model_name_or_path", _reward_model)),
        ("steps_per_generation", _windows),
        has_own_stage=True,
    ),
    "transformers": Program(
        *("transformers' TrainingArguments", TRANSFORMERS, Rules("transformers", "unnamed")),
        names_data=False,
        truncates=False,
    ),
    "axolotl": Program(
        "axolotl",
        TRAINERS["axolotl"],
        Rules(
            "axolotl",
            functions=(
                ("datasets", _axolotl_data),
                ("use_wandb", _axolotl_trackers),
                ("special_tokens", _axolotl_tokens),
            ),
        ),
        truncates=False,
    ),
}
