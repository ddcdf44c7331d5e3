"""Convert a YAML file of MindSpore Transformers to the settings of a recipe: one table, key by key.

A key has an equivalent setting, needs none, or is rejected with the reason and an alternative.
``train_dataset`` is not converted: the result says what to add.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, ClassVar

from ...recipe.overrides import Overrides, override
from ...recipe.recipe import ConvertedFile, Importer, Recipe
from ...recipe.yaml import Document
from .prediction import convert_prediction
from .ranks import model_near, rank_folders, root_of
from .rules import (
    CONVERTER,
    SAFETENSORS,
    UNCUT,
    Converted,
    KeyRule,
    RefusedKeyError,
    Settings,
    Together,
    apply,
    mesh,
    nothing,
    only,
    reading_of,
    to,
)
from .words import prompts_of, read_words


def _data_to_add(content: Mapping[str, Any]) -> str:
    """What the user adds in place of ``train_dataset``: it says how tokens are made, and a recipe
    names rows."""
    section = content.get("train_dataset")
    loader = section.get("data_loader") if isinstance(section, Mapping) else None
    if not isinstance(loader, Mapping):
        return "no train_dataset: set data.datasets to the training data"
    path = f" of {loader['path']}" if isinstance(loader.get("path"), str) else ""
    return (
        f"train_dataset: {loader.get('type')}{path} is not converted; set data.datasets to the "
        "rows themselves, and what its handlers say as data.cutoff_len, data.packing, "
        "data.max_samples and data.shuffle"
    )


_STAGES = {"train": "pt", "finetune": "sft"}
_OWN_FILES = (
    "checkpoints store weights and optimizer in separate files; `surefoot ckpt convert --to "
    "huggingface` writes only the weights"
)


# At least one of these keys is in every file that runs anything.
_SIGNS = {
    *("run_mode", "runner_config", "runner_wrapper", "parallel_config", "train_dataset"),
    *("load_ckpt_format", "auto_trans_ckpt", "pretrained_model_dir", "use_parallel"),
}


class MindFormers(Importer):
    """Files of MindSpore Transformers, formerly MindFormers."""

    title: ClassVar[str] = "MindSpore Transformers"

    def recognise(self, data: Mapping[str, object]) -> bool:
        """By its keys; a recipe with one of them has a stage."""
        return "stage" not in data and bool(_SIGNS & data.keys())

    def convert(self, document: Document, overrides: Overrides) -> ConvertedFile:
        """The recipe; it lacks the data, unless ``overrides`` name some, and the model if the
        training began with new weights."""
        converted = convert(document, overrides)
        data = override(Recipe, Document(converted.nested(), document.name), overrides)
        names_data = _overridden(overrides, "data.datasets") is not None
        notes = converted.advice[1:] if names_data else list(converted.advice)
        if converted.left:
            notes.append(f"not used: {', '.join(converted.left)}")
        is_complete = names_data and "path" in converted.nested().get("model", {})
        return ConvertedFile(self.title, data, notes, is_complete=is_complete)

    def convert_prediction(self, document: Document) -> Document | None:
        """The settings of a file with ``run_mode: predict``."""
        data = document.data
        is_prediction = isinstance(data, Mapping) and data.get("run_mode") == "predict"
        return convert_prediction(document) if is_prediction else None

    def prompts(self, document: Document) -> list[str]:
        """Those of ``predict_data``."""
        return prompts_of(document.data) if isinstance(document.data, Mapping) else []

    def read_words(self, words: Sequence[str]) -> tuple[Document, list[str]] | None:
        """``--config FILE --run_mode finetune``, and overrides of a recipe's fields."""
        return read_words(words)


IMPORTER = MindFormers()


def _overridden(overrides: Overrides, path: str) -> object | None:
    """The value of a setting that was given beside the file; None if it was not."""
    if isinstance(overrides, Mapping):
        return overrides.get(path)
    values = [each.partition("=")[2] for each in overrides if each.startswith(f"{path}=")]
    return values[-1] if values else None


def convert(document: Document, overrides: Overrides = ()) -> Converted:
    """The settings of the keys of ``document``, for which ``overrides`` may name the model. Raises
    ``RecipeError``: with every unsupported key, each with line, reason and alternative."""
    model = _overridden(overrides, "model.path")
    if model is not None and isinstance(document.data, dict):
        document = replace(document, data={**document.data, "pretrained_model_dir": model})
    converted = apply(document, _RULES, _TOGETHER)
    assert isinstance(document.data, dict)
    converted.advice.append(_data_to_add(document.data))
    if "model.path" not in converted.settings:
        what = "its weights"
        if "model.new_weights" in converted.settings:
            what = "no weights, as the training begins with new ones (model.new_weights)"
        converted.advice.append(
            "no pretrained_model_dir or load_checkpoint: set model.path to the folder of the "
            f"model: config.json, tokenizer, and {what}"
        )
    return converted


def _run_mode(value: Any) -> Settings:
    if value in _STAGES:
        return {"stage": _STAGES[value]}
    if value == "predict":
        raise RefusedKeyError(
            f"{value!r} is not a training run; `surefoot predict FILE --prompts PROMPTS --output "
            "OUTPUT` takes this file as it is"
        )
    if value == "eval":
        raise RefusedKeyError(f"{value!r} is not a training run; use `surefoot eval RECIPE`")
    raise RefusedKeyError(f"{value!r}: expected train or finetune")


def _parallel(content: Mapping[str, Any]) -> Settings:
    """Ranks and batch size: data-parallel ranks shard the optimizer, or hold replicas."""
    config = content.get("parallel_config") or {}
    runner, parallel = content.get("runner_config") or {}, content.get("parallel") or {}
    axis = "dp_shard" if parallel.get("enable_parallel_optimizer") else "dp_replicate"
    axes = mesh(config, axis)
    settings: dict[str, object] = {}
    if (count := prod(axes.values())) > 1:
        settings["parallel.num_processes"] = count
        # dp_shard would take what the others leave.
        written = {name: n for name, n in axes.items() if n > 1 or name in ("dp_shard", "tp")}
        settings |= {f"parallel.{name}": n for name, n in written.items()}
        if config.get("use_seq_parallel") and axes["tp"] > 1:
            settings["parallel.sequence_parallel"] = True
    if isinstance(batch := runner.get("batch_size"), int):
        windows = (runner.get("gradient_accumulation_steps") or 1) * (
            config.get("micro_batch_num") or 1 if axes["pp"] > 1 else 1
        )
        settings["train.micro_batch_size"] = batch
        settings["train.global_batch_size"] = batch * axes[axis] * windows
    return settings


def _start(content: Mapping[str, Any]) -> Settings:
    """The initial model, and whether to resume."""
    weights, model = content.get("load_checkpoint") or "", content.get("pretrained_model_dir") or ""
    resume = content.get("resume_training") or False
    reading = reading_of(content, weights)
    is_model = bool(weights) and model_near(Path(weights)) == Path(weights)
    if resume and weights:
        if not model and not is_model:
            raise RefusedKeyError(
                f"resume_training: {weights!r} has no config.json beside its weights; name "
                "their model with pretrained_model_dir, or model.path=MODEL behind the file"
            )
        start = weights if is_model else model
        return {"model.path": start, "checkpoint.resume": _saved_at(weights, resume), **reading}
    if isinstance(resume, str):
        return {"checkpoint.resume": resume}
    if weights and model and not is_model:
        raise RefusedKeyError(
            f"{weights!r} has no config.json beside its weights; convert both to one model "
            f"first: surefoot ckpt convert {weights} MODEL --to huggingface --base {model}"
        )
    settings: dict[str, object] = {}
    if content.get("run_mode") == "train" and not weights:
        settings["model.new_weights"] = True  # pretraining begins from nothing there
    path = weights or model
    return {**settings, **({"model.path": path} if path else {}), **reading}


def _saved_at(weights: str, resume: str | bool) -> str:
    """The checkpoint to resume from: the latest step, or that of a file's name."""
    if not isinstance(resume, str):
        return weights
    name = re.sub(r"_rank_\d+", "_rank_0", resume)
    name = name if name.endswith(".safetensors") else f"{name}.safetensors"
    folders = rank_folders(root_of(Path(weights)))
    return str(folders.get(0, root_of(Path(weights)) / "rank_0") / name)


def _schedule(content: Mapping[str, Any]) -> Settings:
    """The learning rate and its schedule."""
    section = content.get("lr_schedule") or {}
    rate = section.get("learning_rate") or (content.get("optimizer") or {}).get("learning_rate")
    settings: dict[str, object] = {}
    if kind := section.get("type"):
        if kind not in _SCHEDULES:
            raise RefusedKeyError(f"type {kind!r}: expected one of {', '.join(_SCHEDULES)}")
        settings["schedule"] = _SCHEDULES[kind]
    if isinstance(rate, int | float) and rate > 0:
        settings["learning_rate"] = rate
        if end := section.get("lr_end"):
            settings["min_lr_ratio"] = end / rate
    ratio, steps = section.get("warmup_ratio"), section.get("warmup_steps")
    settings |= {"warmup_ratio": ratio} if ratio is not None else {}
    settings |= {"warmup_steps": steps} if ratio is None and steps is not None else {}
    settings |= {"decay_ratio": section["decay_ratio"]} if section.get("decay_ratio") else {}
    if section.get("total_steps") not in (None, -1):
        raise RefusedKeyError(
            f"total_steps {section['total_steps']}: a schedule always runs over the steps of "
            "the run; leave it at -1, and set train.max_steps"
        )
    return {f"optim.adamw.{name}": value for name, value in settings.items()}


def _betas(value: Any) -> Settings:
    if not isinstance(value, list) or len(value) != 2:
        raise RefusedKeyError(f"expected two numbers, got {value!r}")
    return {"optim.adamw.beta1": value[0], "optim.adamw.beta2": value[1]}


_SCHEDULES = {
    "CosineWithWarmUpLR": "cosine",
    "LinearWithWarmUpLR": "linear",
    "ConstantWarmUpLR": "constant",
    "WarmUpStableDecayLR": "wsd",
}
_TOGETHER: Together = (
    (("parallel_config",), _parallel),
    (("load_checkpoint",), _start),
    (("lr_schedule",), _schedule),
)
_MONITOR = "callbacks.CheckpointMonitor."
_RULES: dict[str, KeyRule] = {
    "run_mode": _run_mode,
    "seed": to("train.seed", int),
    "output_dir": to("train.output_dir", str),
    "load_checkpoint": nothing,  # with pretrained_model_dir and resume_training: _start
    "pretrained_model_dir": nothing,
    "resume_training": nothing,
    "load_ckpt_format": SAFETENSORS,
    "auto_trans_ckpt": nothing,  # any layout is cut for any processes, always
    "remove_redundancy": nothing,  # the files say it
    "src_strategy_path_or_dir": nothing,  # reading_of
    "use_parallel": nothing,  # parallel_config says it
    "only_save_strategy": only((False, None), "compilation is not needed"),
    "resume_by_last_timestamp_ckpt": only(
        (False, None), "the latest valid checkpoint is used, by its step"
    ),
    "ignore_data_skip": only((False, None), "a run always resumes with the next example"),
    "data_skip_steps": only((0, None), "a run always resumes with the next example"),
    **{f"parallel_config.{name}": nothing for name in ("data_parallel", "model_parallel")},
    **{f"parallel_config.{n}": nothing for n in ("pipeline_stage", "micro_batch_num")},
    **UNCUT,
    "parallel_config.use_seq_parallel": nothing,
    "parallel_config.gradient_aggregation_group": nothing,
    "parallel_config.vocab_emb_dp": nothing,  # files of any layout are read
    "parallel.enable_parallel_optimizer": nothing,
    "runner_config.epochs": to("train.num_epochs", int),
    "runner_config.batch_size": to("train.micro_batch_size", int),
    "runner_config.gradient_accumulation_steps": nothing,
    "runner_config.sink_mode": nothing,
    "runner_config.sink_size": nothing,
    "optimizer.type": only(
        ("AdamW", "FusedAdamWeightDecay", "FP32StateAdamWeightDecay"), "only AdamW is supported"
    ),
    "optimizer.betas": _betas,
    "optimizer.eps": to("optim.adamw.epsilon"),
    "optimizer.weight_decay": to("optim.adamw.weight_decay"),
    "optimizer.learning_rate": nothing,  # lr_schedule's wins: _schedule
    **{f"lr_schedule.{n}": nothing for n in ("type", "learning_rate", "lr_end", "decay_ratio")},
    **{f"lr_schedule.{n}": nothing for n in ("warmup_ratio", "warmup_steps", "total_steps")},
    "lr_schedule.warmup_lr_init": only((0, None), "the warmup begins at the first step's share"),
    "train_dataset.data_loader": nothing,  # read_data
    "callbacks.MFLossMonitor.per_print_times": to("train.log_steps", int),
    f"{_MONITOR}save_checkpoint_steps": to("checkpoint.save_steps", int),
    f"{_MONITOR}save_checkpoint_seconds": lambda value: (
        {"checkpoint.save_minutes": value / 60} if value else {}
    ),
    f"{_MONITOR}keep_checkpoint_max": to("checkpoint.keep", int),
    f"{_MONITOR}keep_checkpoint_per_n_minutes": only(
        (0, None), "use checkpoint.keep_every (steps) or keep_hours instead"
    ),
    f"{_MONITOR}prefix": nothing,  # folders are called checkpoint-STEP
    f"{_MONITOR}checkpoint_format": only(
        ("safetensors",), f"checkpoints are safetensors; for older ones, {CONVERTER}"
    ),
    f"{_MONITOR}remove_redundancy": nothing,  # a slice is written once, always
    f"{_MONITOR}integrated_save": lambda value: {
        "checkpoint.layout": "full" if value else "distributed"
    },
    f"{_MONITOR}async_save": lambda value: {"checkpoint.async_save": bool(value)},
    f"{_MONITOR}save_network_params": only((False, None), _OWN_FILES),
    f"{_MONITOR}save_trainable_params": only((False, None), _OWN_FILES),
    f"{_MONITOR}directory": only((None, ""), "checkpoints are always in output_dir"),
    f"{_MONITOR}exception_save": only(
        (False, None),
        "SIGTERM and Ctrl-C always save; a failure resumes from the latest checkpoint",
    ),
}
