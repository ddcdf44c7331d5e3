"""A YAML file of MindSpore Transformers as the settings of a recipe: one table, key by key.

A key says the same here, says nothing here, or is refused with the reason and what to do. What data
sets come to is in ``mindformers_data``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.mindspore.ranks import model_near, root_of
from ..schema import Keys, Problem
from .document import Document
from .mindformers_data import read_data

Found = Mapping[str, object]  # dotted settings of ours
Rule = Callable[[Any], Found]

_PLURAL = ("context_parallel", "expert_parallel", "seq_split_num", "micro_batch_interleave_num")
_STAGES = {"train": "pt", "finetune": "sft"}
_CONVERTER = "convert it with mindspore.ckpt_to_safetensors"
_OWN_FILES = (
    "a checkpoint here keeps weights and optimizer in files of their own; "
    "`surefoot ckpt convert --to huggingface` writes the weights alone"
)


class _RefusedError(Exception):
    """Why a value is not taken."""


@dataclass
class Converted:
    """What became of the file."""

    settings: dict[str, object] = field(default_factory=dict)  # dotted, as overrides are
    left: list[str] = field(default_factory=list)  # keys that were not looked at
    advice: list[str] = field(default_factory=list)  # what is to be added by hand

    def nested(self) -> dict[str, Any]:
        """The settings as sections of a recipe."""
        found: dict[str, Any] = {}
        for path, value in self.settings.items():
            *sections, name = path.split(".")
            inner = found
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[name] = value
        return found


def convert(document: Document) -> Converted:
    """The settings that the keys of ``document`` come to.

    Raises:
        RecipeError: with every key that cannot be had here, each with line, reason and way out.
    """
    told = document.data
    if not isinstance(told, dict):
        raise document.error([Problem((), "expected the keys of MindSpore Transformers")])
    done, problems = Converted(), list[Problem]()
    for path, value in _keys(told):
        rule = _RULES.get(_name(path))
        if rule is None:
            done.left.append(_name(path))
            continue
        try:
            done.settings |= rule(value)
        except _RefusedError as error:
            problems.append(Problem(path, str(error)))
    for path, together in _TOGETHER:
        try:
            done.settings |= together(told)
        except _RefusedError as error:
            problems.append(Problem(path, str(error)))
    if problems:
        raise document.error(problems)
    data = read_data(told)
    done.settings |= data.settings
    done.advice += data.advice
    return done


def _keys(told: Mapping[str, Any]) -> Iterator[tuple[Keys, Any]]:
    """Every key of the top and of the sections, with its value; callbacks by their settings."""
    for key, value in told.items():
        if key == "callbacks" and isinstance(value, list):
            for i, callback in enumerate(value):
                for name, setting in callback.items() if isinstance(callback, dict) else ():
                    if name != "type":
                        yield (key, i, str(callback.get("type")), name), setting
        elif isinstance(value, dict):
            for name, setting in value.items():
                yield (key, name), setting
        else:
            yield (key,), value


def _name(path: Keys) -> str:
    """A key as the table has it: a callback's by its type, not its place in the list."""
    return ".".join(str(key) for key in path if not isinstance(key, int))


def _to(path: str, kind: type = object) -> Rule:
    def rule(value: Any) -> Found:
        if value is None:
            return {}
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise _RefusedError(f"expected {kind.__name__}, got {value!r}")
        return {path: value}

    return rule


def _nothing(_value: Any) -> Found:
    """It has no counterpart and needs none."""
    return {}


def _only(allowed: tuple[Any, ...], reason: str) -> Rule:
    def rule(value: Any) -> Found:
        if value not in allowed:
            raise _RefusedError(f"{value!r}: {reason}")
        return {}

    return rule


def _run_mode(value: Any) -> Found:
    if value in _STAGES:
        return {"stage": _STAGES[value]}
    if value in ("predict", "eval"):
        way = "surefoot chat" if value == "predict" else "surefoot eval"
        raise _RefusedError(f"{value!r} is no training; take `{way} FOLDER`")
    raise _RefusedError(f"{value!r}: expected train, finetune, predict or eval")


def _integrated(value: Any) -> Found:
    return {"checkpoint.layout": "full" if value else "distributed"}


def _async(value: Any) -> Found:
    return {"checkpoint.async_save": bool(value)}


def _seconds(value: Any) -> Found:
    return {"checkpoint.save_minutes": value / 60} if value else {}


def _parallel(told: Mapping[str, Any]) -> Found:
    """Processes and batch: data parallel ranks share the optimizer, or have copies."""
    config = told.get("parallel_config") or {}
    runner, parallel = told.get("runner_config") or {}, told.get("parallel") or {}
    sizes = {n: config.get(n, 1) for n in ("data_parallel", "model_parallel", "pipeline_stage")}
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise _RefusedError(f"{name} must be a whole number of at least 1, got {value!r}")
    data, model, stages = sizes.values()
    found: dict[str, object] = {}
    if data * model * stages > 1:
        found["parallel.num_processes"] = data * model * stages
        found["parallel.tp"] = model
        is_sharded = bool(parallel.get("enable_parallel_optimizer"))
        found["parallel.dp_shard" if is_sharded else "parallel.dp_replicate"] = data
        found |= {} if is_sharded else {"parallel.dp_shard": 1}
        found |= {"parallel.pp": stages} if stages > 1 else {}
        if config.get("use_seq_parallel") and model > 1:
            found["parallel.sequence_parallel"] = True
    if isinstance(batch := runner.get("batch_size"), int):
        windows = (runner.get("gradient_accumulation_steps") or 1) * (
            config.get("micro_batch_num") or 1 if stages > 1 else 1
        )
        found["train.micro_batch_size"] = batch
        found["train.global_batch_size"] = batch * data * windows
    return found


def _start(told: Mapping[str, Any]) -> Found:
    """The model to begin with, and whether to go on."""
    weights, model = told.get("load_checkpoint") or "", told.get("pretrained_model_dir") or ""
    resume = told.get("resume_training") or False
    is_model = bool(weights) and model_near(Path(weights)) == Path(weights)
    if resume and weights:
        if not model and not is_model:
            raise _RefusedError(
                f"resume_training: {weights!r} has no config.json beside its weights; say the "
                "model they are of with pretrained_model_dir"
            )
        start = weights if is_model else model
        return {"model.path": start, "checkpoint.resume": _saved_at(weights, resume)}
    if isinstance(resume, str):
        return {"checkpoint.resume": resume}
    if weights and model and not is_model:
        raise _RefusedError(
            f"{weights!r} has no config.json beside its weights; make a model of both once: "
            f"surefoot ckpt convert {weights} MODEL --to huggingface --base {model}"
        )
    path = weights or model
    return {"model.path": path} if path else {}


def _saved_at(weights: str, resume: str | bool) -> str:
    """What to go on from: the newest step, or that of a file's name."""
    if not isinstance(resume, str):
        return weights
    name = re.sub(r"_rank_\d+", "_rank_0", resume)
    name = name if name.endswith(".safetensors") else f"{name}.safetensors"
    return str(root_of(Path(weights)) / "rank_0" / name)


def _schedule(told: Mapping[str, Any]) -> Found:
    """The learning rate and its course."""
    section = told.get("lr_schedule") or {}
    rate = section.get("learning_rate") or (told.get("optimizer") or {}).get("learning_rate")
    found: dict[str, object] = {}
    if kind := section.get("type"):
        if kind not in _SCHEDULES:
            raise _RefusedError(f"type {kind!r}: expected one of {', '.join(_SCHEDULES)}")
        found["schedule"] = _SCHEDULES[kind]
    if isinstance(rate, int | float) and rate > 0:
        found["learning_rate"] = rate
        if end := section.get("lr_end"):
            found["min_lr_ratio"] = end / rate
    ratio, steps = section.get("warmup_ratio"), section.get("warmup_steps")
    found |= {"warmup_ratio": ratio} if ratio is not None else {}
    found |= {"warmup_steps": steps} if ratio is None and steps is not None else {}
    found |= {"decay_ratio": section["decay_ratio"]} if section.get("decay_ratio") else {}
    if section.get("total_steps") not in (None, -1):
        raise _RefusedError(
            f"total_steps {section['total_steps']}: here a schedule runs over the steps of the "
            "run; leave it at -1, and say how many with train.max_steps"
        )
    return {f"optim.adamw.{name}": value for name, value in found.items()}


def _betas(value: Any) -> Found:
    if not isinstance(value, list) or len(value) != 2:
        raise _RefusedError(f"expected two numbers, got {value!r}")
    return {"optim.adamw.beta1": value[0], "optim.adamw.beta2": value[1]}


_SCHEDULES = {
    "CosineWithWarmUpLR": "cosine",
    "LinearWithWarmUpLR": "linear",
    "ConstantWarmUpLR": "constant",
    "WarmUpStableDecayLR": "wsd",
}
_TOGETHER: tuple[tuple[Keys, Rule], ...] = (
    (("parallel_config",), _parallel),
    (("load_checkpoint",), _start),
    (("lr_schedule",), _schedule),
)
_MONITOR = "callbacks.CheckpointMonitor."
_RULES: dict[str, Rule] = {
    "run_mode": _run_mode,
    "seed": _to("train.seed", int),
    "output_dir": _to("train.output_dir", str),
    "load_checkpoint": _nothing,  # with pretrained_model_dir and resume_training: _start
    "pretrained_model_dir": _nothing,
    "resume_training": _nothing,
    "load_ckpt_format": _only(("safetensors",), f"only safetensors are read; {_CONVERTER}"),
    "auto_trans_ckpt": _nothing,  # any layout is cut for any processes, always
    "remove_redundancy": _nothing,  # the files say it
    "src_strategy_path_or_dir": _only(
        ("", None),
        "strategy files are looked for in `strategy` beside the ranks; move them there, or "
        "convert the weights once with `surefoot ckpt convert --to huggingface --strategy`",
    ),
    "use_parallel": _nothing,  # parallel_config says it
    "only_save_strategy": _only((False, None), "there is nothing to compile here"),
    "resume_by_last_timestamp_ckpt": _only(
        (False, None), "the newest checkpoint that is whole is taken, by its step"
    ),
    "ignore_data_skip": _only((False, None), "a run goes on with the next example, always"),
    "data_skip_steps": _only((0, None), "a run goes on with the next example, always"),
    **{f"parallel_config.{name}": _nothing for name in ("data_parallel", "model_parallel")},
    **{f"parallel_config.{n}": _nothing for n in ("pipeline_stage", "micro_batch_num")},
    **{f"parallel_config.{n}": _only((1, None), "it is not supported here") for n in _PLURAL},
    "parallel_config.use_seq_parallel": _nothing,
    "parallel_config.gradient_aggregation_group": _nothing,
    "parallel_config.vocab_emb_dp": _nothing,  # files of any layout are read
    "parallel.enable_parallel_optimizer": _nothing,
    "runner_config.epochs": _to("train.num_epochs", int),
    "runner_config.batch_size": _to("train.micro_batch_size", int),
    "runner_config.gradient_accumulation_steps": _nothing,
    "runner_config.sink_mode": _nothing,
    "runner_config.sink_size": _nothing,
    "optimizer.type": _only(
        ("AdamW", "FusedAdamWeightDecay", "FP32StateAdamWeightDecay"), "there is only AdamW here"
    ),
    "optimizer.betas": _betas,
    "optimizer.eps": _to("optim.adamw.epsilon"),
    "optimizer.weight_decay": _to("optim.adamw.weight_decay"),
    "optimizer.learning_rate": _nothing,  # lr_schedule's wins: _schedule
    **{f"lr_schedule.{n}": _nothing for n in ("type", "learning_rate", "lr_end", "decay_ratio")},
    **{f"lr_schedule.{n}": _nothing for n in ("warmup_ratio", "warmup_steps", "total_steps")},
    "lr_schedule.warmup_lr_init": _only((0, None), "a warm-up begins at the first step's share"),
    "train_dataset.data_loader": _nothing,  # read_data
    "callbacks.MFLossMonitor.per_print_times": _to("train.log_steps", int),
    f"{_MONITOR}save_checkpoint_steps": _to("checkpoint.save_steps", int),
    f"{_MONITOR}save_checkpoint_seconds": _seconds,
    f"{_MONITOR}keep_checkpoint_max": _to("checkpoint.keep", int),
    f"{_MONITOR}keep_checkpoint_per_n_minutes": _only(
        (0, None), "use checkpoint.keep_every (steps) or keep_hours instead"
    ),
    f"{_MONITOR}prefix": _nothing,  # folders are called checkpoint-STEP
    f"{_MONITOR}checkpoint_format": _only(
        ("safetensors",), f"checkpoints are safetensors; of older ones, {_CONVERTER}"
    ),
    f"{_MONITOR}remove_redundancy": _nothing,  # a slice is written once, always
    f"{_MONITOR}integrated_save": _integrated,
    f"{_MONITOR}async_save": _async,
    f"{_MONITOR}save_network_params": _only((False, None), _OWN_FILES),
    f"{_MONITOR}save_trainable_params": _only((False, None), _OWN_FILES),
    f"{_MONITOR}directory": _only((None, ""), "checkpoints lie in output_dir"),
    f"{_MONITOR}exception_save": _only(
        (False, None), "SIGTERM and Ctrl-C save anyway; a failure goes back to the last checkpoint"
    ),
}
