"""Convert a YAML file of MindSpore Transformers to the settings of a recipe: one table, key by key.

A key has an equivalent setting, needs none, or is rejected with the reason and an alternative.
Files with ``run_mode: predict`` have a table of their own.

Rules for the keys of a YAML file of MindSpore Transformers.

A rule converts a value to dotted settings, or raises the reason why it cannot be converted. Rules
for several keys get the whole file.

Convert ``train_dataset`` of a YAML file of MindSpore Transformers, as far as possible.

Loaders of rows (a dataset of a hub, or a file) become an entry for ``dataset_info.json``, which the
user adds, and the corresponding settings. Loaders of pretokenized data, MindRecord or Megatron's
``.bin``, contain no rows; the result says what to add instead.

Convert a YAML file of MindSpore Transformers with ``run_mode: predict`` to the settings of a
``Prediction``.

Sampling settings occur at three places there: in ``model.model_config``, in a section of their own,
and, from their command line, at the top level, which has precedence. Keys for training only are
ignored.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, ClassVar

from ...recipe.overrides import Overrides, override
from ...recipe.prediction import Prediction
from ...recipe.recipe import ConvertedFile, Importer, Recipe
from ...recipe.yaml import Document
from ...schema import Keys, Problem
from .ranks import model_near, root_of

Found = Mapping[str, object]  # dotted settings of ours
KeyRule = Callable[[Any], Found]
Together = Sequence[tuple[Keys, KeyRule]]  # where a rule's error is shown, and the rule


class RefusedKeyError(Exception):
    """Why a value is rejected."""


@dataclass
class Converted:
    """The result for the file."""

    settings: dict[str, object] = field(default_factory=dict)  # dotted, as overrides are
    left: list[str] = field(default_factory=list)  # keys that were not looked at
    advice: list[str] = field(default_factory=list)  # what is to be added by hand
    is_prediction: bool = False  # the settings are those of a ``Prediction``, not of a recipe

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


def apply(document: Document, rules: Mapping[str, KeyRule], together: Together) -> Converted:
    """The settings of the keys of ``document``. Raises ``RecipeError``: with every unsupported key,
    each with line, reason and alternative."""
    told = document.data
    if not isinstance(told, dict):
        raise document.error([Problem((), "expected the keys of MindSpore Transformers")])
    done, problems = Converted(), list[Problem]()
    for path, value in _keys(told):
        rule = rules.get(_name(path))
        if rule is None:
            done.left.append(_name(path))
            continue
        try:
            done.settings |= rule(value)
        except RefusedKeyError as error:
            problems.append(Problem(path, str(error)))
    for path, of_several in together:
        try:
            done.settings |= of_several(told)
        except RefusedKeyError as error:
            problems.append(Problem(path, str(error)))
    if problems:
        raise document.error(problems)
    return done


def _keys(told: Mapping[str, Any]) -> Iterator[tuple[Keys, Any]]:
    """Every key of the top level and of the sections, with its value; callbacks by setting."""
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
    """A key as in the table: a callback's by its type, not its position in the list."""
    return ".".join(str(key) for key in path if not isinstance(key, int))


def to(path: str, kind: type = object) -> KeyRule:
    """The key is the setting ``path``, of the type ``kind``."""

    def rule(value: Any) -> Found:
        if value is None:
            return {}
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise RefusedKeyError(f"expected {kind.__name__}, got {value!r}")
        return {path: value}

    return rule


def nothing(_value: Any) -> Found:
    """The key has no counterpart and needs none."""
    return {}


def only(allowed: tuple[Any, ...], reason: str) -> KeyRule:
    """These values need no setting; any other is rejected for ``reason``."""

    def rule(value: Any) -> Found:
        if value not in allowed:
            raise RefusedKeyError(f"{value!r}: {reason}")
        return {}

    return rule


_ROWS = ("HFDataLoader", "CommonDataLoader")
_FILES = ("json", "csv", "parquet", "text")  # kinds of files that load_dataset is asked for
_TOKENS = {
    "MindDataset": "MindRecord files",
    "TFRecordDataset": "TFRecord files",
    "BlendedMegatronDatasetDataLoader": "Megatron's .bin files",
}
_ADD = "set data.dataset_dir and data.datasets to the training data"


def read_data(told: Mapping[str, Any], done: Converted) -> None:
    """Add the settings of ``train_dataset``, and what the user must add."""
    section = told.get("train_dataset")
    loader = section.get("data_loader") if isinstance(section, Mapping) else None
    if not isinstance(loader, Mapping):
        done.advice.append(f"no train_dataset: {_ADD}")
        return
    kind = str(loader.get("type"))
    if kind not in _ROWS:
        what = f", {_TOKENS[kind]} with tokens," if kind in _TOKENS else ""
        hint = f"{_ADD}, the rows themselves"
        done.advice.append(f"train_dataset: {kind}{what} is not supported; {hint}")
        return
    entry = _entry(loader)
    if entry is None:
        done.advice.append(f"train_dataset: {kind} names neither a dataset nor a file; {_ADD}")
    else:
        name, content = entry
        done.settings["data.datasets"] = [name]
        line = json.dumps({name: content}, ensure_ascii=False)
        done.advice.append(f"train_dataset: add {line} to dataset_info.json in data.dataset_dir")
    if isinstance(loader.get("shuffle"), bool):
        done.settings["data.shuffle"] = loader["shuffle"]
    for handler in loader.get("handler") or ():
        _take_handler(handler, done)


def _entry(loader: Mapping[str, Any]) -> tuple[str, dict[str, object]] | None:
    """A dataset's name, and its entry for ``dataset_info.json``."""
    path, files = loader.get("path"), loader.get("data_files")
    if isinstance(files, Mapping):
        files = files.get("train")
    if isinstance(files, list) and len(files) == 1:
        files = files[0]
    if path in _FILES and isinstance(files, str):
        return _plain(PurePath(files).stem), {"file_name": files}
    if not isinstance(path, str) or not path or path in _FILES:
        return None
    if loader.get("load_func") == "load_from_disk" or path.startswith((".", "/", "~")):
        return _plain(PurePath(path).name), {"file_name": path}
    found: dict[str, object] = {"hf_hub_url": path}
    found |= {
        ours: loader[theirs]
        for theirs, ours in (("split", "split"), ("name", "subset"))
        if isinstance(loader.get(theirs), str)
    }
    return _plain(PurePath(path).name), found


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name) or "data"


def _take_handler(handler: Any, done: Converted) -> None:
    """One processing step from rows to tokens."""
    told = handler if isinstance(handler, Mapping) else {"type": handler}
    kind = str(told.get("type"))
    if type(told.get("seq_length")) is int:
        done.settings["data.cutoff_len"] = told["seq_length"]
    if kind == "take" and type(told.get("n")) is int:
        done.settings["data.max_samples"] = told["n"]
    elif kind == "PackingHandler":
        done.settings["data.packing"] = True
    elif kind != "AlpacaInstructDataHandler":
        done.advice.append(
            f"train_dataset: {kind} is not converted; the columns of rows, and their meaning, "
            "are set in dataset_info.json"
        )


CONVERTER = "convert it with mindspore.ckpt_to_safetensors"
_PLURAL = ("context_parallel", "expert_parallel", "seq_split_num", "micro_batch_interleave_num")
SAFETENSORS = only(("safetensors",), f"only safetensors are supported; {CONVERTER}")
STRATEGY = only(
    ("", None),
    "strategy files must be in `strategy` beside the ranks; move them there, or convert the "
    "weights once with `surefoot ckpt convert --to huggingface --strategy`",
)
UNCUT = {f"parallel_config.{n}": only((1, None), "it is not supported here") for n in _PLURAL}
_SAME = ("do_sample", "temperature", "top_p", "top_k", "repetition_penalty", "max_new_tokens")
_WHOLE = ("max_decode_length", "max_length", "predict_length")  # prompt and answer together
_SECTIONS = ("generation", "generation_config")
_AXES = ("data_parallel", "model_parallel", "pipeline_stage")


def sizes(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """``data_parallel``, ``model_parallel`` and ``pipeline_stage`` of a ``parallel_config``."""
    data, model, stages = (config.get(name, 1) for name in _AXES)
    for name, value in zip(_AXES, (data, model, stages), strict=True):
        if type(value) is not int or value < 1:
            raise RefusedKeyError(f"{name} must be a whole number of at least 1, got {value!r}")
    return data, model, stages


def convert_prediction(document: Document) -> Converted:
    """The settings of the keys of ``document``, and the command for them. Raises ``RecipeError`` as
    ``convert``."""
    done = apply(document, _PREDICTION_RULES, _PREDICTION_TOGETHER)
    done.is_prediction = True
    told = document.data
    assert isinstance(told, dict)
    done.advice += _advice(told)
    return done


def _prediction_parallel(told: Mapping[str, Any]) -> Found:
    data, model, stages = sizes(told.get("parallel_config") or {})
    if told.get("use_parallel") is False or data * model * stages == 1:
        return {}
    if stages > 1:
        raise RefusedKeyError(
            f"pipeline_stage {stages}: responses are generated token by token, and a pipeline "
            "would idle; use model_parallel"
        )
    found = {"parallel.num_processes": data * model, "parallel.tp": model}
    return found | ({"parallel.dp_replicate": data} if data > 1 else {})


def _model(told: Mapping[str, Any]) -> Found:
    weights, model = told.get("load_checkpoint") or "", told.get("pretrained_model_dir") or ""
    if not weights or not model or model_near(Path(weights)) == Path(weights):
        return {"model.path": weights or model} if weights or model else {}
    return {"model.path": model, "model.weights": weights}


def _sampling(told: Mapping[str, Any]) -> Found:
    found: dict[str, object] = {}
    for section in _places(told):
        if section.get("num_beams") not in (None, 1):
            raise RefusedKeyError(
                f"num_beams {section['num_beams']!r}: beam search is not supported"
            )
        given = {n: section[n] for n in _SAME if section.get(n) is not None}
        longest = next((section[name] for name in _WHOLE if section.get(name)), None)
        if longest is not None and "max_new_tokens" not in given:
            given["max_new_tokens"] = longest
        found |= given
    if found.get("temperature") == 0:
        found |= {"temperature": 1.0, "do_sample": False}
    return {f"generate.{name}": value for name, value in found.items()}


def _places(told: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The places of sampling settings; later ones have precedence."""
    model = told.get("model")
    config = model.get("model_config") if isinstance(model, Mapping) else None
    for section in (config, *(told.get(name) for name in _SECTIONS), told):
        if isinstance(section, Mapping):
            yield section


def _advice(told: Mapping[str, Any]) -> Iterator[str]:
    """Settings for the command line, and notes."""
    for section in _places(told):
        whole = next((name for name in _WHOLE if section.get(name)), None)
        if whole is not None and not section.get("max_new_tokens"):
            yield (
                f"{whole} counts the prompt, too; generate.max_new_tokens, which now has its "
                "value, counts the response only"
            )
    data, prompts = told.get("predict_data"), "FILE"
    if isinstance(data, str) and Path(data).is_file():
        prompts = shlex.quote(data)
    elif data:
        yield "predict_data: write the prompts into a FILE, one per line"
    seed = f" --seed {told['seed']}" if type(told.get("seed")) is int else ""
    yield f"then: surefoot predict RECIPE --prompts {prompts} --output answers.jsonl{seed}"


_PREDICTION_TOGETHER = (
    (("parallel_config",), _prediction_parallel),
    (("load_checkpoint",), _model),
    (("model",), _sampling),
)
_PREDICTION_RULES: dict[str, KeyRule] = {
    **dict.fromkeys(("run_mode", "seed", "output_dir", "use_parallel", "auto_trans_ckpt"), nothing),
    **dict.fromkeys(("remove_redundancy", "resume_training", "load_checkpoint"), nothing),
    **dict.fromkeys(("pretrained_model_dir", "predict_data", "model.model_config"), nothing),
    **{f"parallel_config.{name}": nothing for name in (*_AXES, "vocab_emb_dp")},
    **UNCUT,
    "load_ckpt_format": SAFETENSORS,
    "src_strategy_path_or_dir": STRATEGY,
    "only_save_strategy": only((False, None), "compilation is not needed"),
    "predict_batch_size": to("generate.batch_size", int),
    "adapter_id": only(
        (None,), "only one adapter is used at a time; name its folder in model.adapter"
    ),
    "modal_type": only((None,), "prompts must be text"),
    **{
        f"{place}{name}": nothing  # _sampling
        for place in ("", *(f"{section}." for section in _SECTIONS))
        for name in (*_SAME, *_WHOLE, "num_beams")
    },
}


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
    """MindSpore Transformers."""

    title: ClassVar[str] = "MindSpore Transformers"

    def recognise(self, data: Mapping[str, object]) -> bool:
        """By its keys; a recipe with one of them has a stage."""
        return "stage" not in data and bool(_SIGNS & data.keys())

    def convert(self, document: Document, overrides: Overrides) -> ConvertedFile:
        """The recipe, or what ``surefoot predict`` takes in its place."""
        found = convert(document)
        kind = Prediction if found.is_prediction else Recipe
        data = override(kind, Document(found.nested(), document.name), overrides)
        names_data = any(each.startswith("data.datasets") for each in overrides)
        notes = list(found.advice) if found.is_prediction or not names_data else []
        if found.left:
            notes.append(f"not used: {', '.join(found.left)}")
        return ConvertedFile(self.title, data, notes, is_complete=False)


IMPORTER = MindFormers()


def convert(document: Document) -> Converted:
    """The settings of the keys of ``document``: of a recipe, or of a ``Prediction``. Raises
    ``RecipeError``: with every unsupported key, each with line, reason and alternative."""
    told = document.data
    if isinstance(told, dict) and told.get("run_mode") == "predict":
        return convert_prediction(document)
    done = apply(document, _RULES, _TOGETHER)
    assert isinstance(told, dict)
    read_data(told, done)
    return done


def _run_mode(value: Any) -> Found:
    if value in _STAGES:
        return {"stage": _STAGES[value]}
    if value == "eval":
        raise RefusedKeyError(f"{value!r} is not a training run; use `surefoot eval RECIPE`")
    raise RefusedKeyError(f"{value!r}: expected train, finetune, predict or eval")


def _parallel(told: Mapping[str, Any]) -> Found:
    """Ranks and batch size: data-parallel ranks shard the optimizer, or hold replicas."""
    config = told.get("parallel_config") or {}
    runner, parallel = told.get("runner_config") or {}, told.get("parallel") or {}
    data, model, stages = sizes(config)
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
    """The initial model, and whether to resume."""
    weights, model = told.get("load_checkpoint") or "", told.get("pretrained_model_dir") or ""
    resume = told.get("resume_training") or False
    is_model = bool(weights) and model_near(Path(weights)) == Path(weights)
    if resume and weights:
        if not model and not is_model:
            raise RefusedKeyError(
                f"resume_training: {weights!r} has no config.json beside its weights; name "
                "their model with pretrained_model_dir"
            )
        start = weights if is_model else model
        return {"model.path": start, "checkpoint.resume": _saved_at(weights, resume)}
    if isinstance(resume, str):
        return {"checkpoint.resume": resume}
    if weights and model and not is_model:
        raise RefusedKeyError(
            f"{weights!r} has no config.json beside its weights; convert both to one model "
            f"first: surefoot ckpt convert {weights} MODEL --to huggingface --base {model}"
        )
    path = weights or model
    return {"model.path": path} if path else {}


def _saved_at(weights: str, resume: str | bool) -> str:
    """The checkpoint to resume from: the latest step, or that of a file's name."""
    if not isinstance(resume, str):
        return weights
    name = re.sub(r"_rank_\d+", "_rank_0", resume)
    name = name if name.endswith(".safetensors") else f"{name}.safetensors"
    return str(root_of(Path(weights)) / "rank_0" / name)


def _schedule(told: Mapping[str, Any]) -> Found:
    """The learning rate and its schedule."""
    section = told.get("lr_schedule") or {}
    rate = section.get("learning_rate") or (told.get("optimizer") or {}).get("learning_rate")
    found: dict[str, object] = {}
    if kind := section.get("type"):
        if kind not in _SCHEDULES:
            raise RefusedKeyError(f"type {kind!r}: expected one of {', '.join(_SCHEDULES)}")
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
        raise RefusedKeyError(
            f"total_steps {section['total_steps']}: a schedule always runs over the steps of "
            "the run; leave it at -1, and set train.max_steps"
        )
    return {f"optim.adamw.{name}": value for name, value in found.items()}


def _betas(value: Any) -> Found:
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
    "src_strategy_path_or_dir": STRATEGY,
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
