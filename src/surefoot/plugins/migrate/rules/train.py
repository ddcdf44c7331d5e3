"""The sections ``train``, ``checkpoint`` and ``generate``."""

from __future__ import annotations

import math
from typing import get_args

from ....storage.hubs import is_repository_name
from ....training.section import TrackerName
from ..arguments import RefusedError
from ..given import GivenArguments, Settings

_GENERATING = ("do_sample", "temperature", "top_p", "top_k", "max_new_tokens", "repetition_penalty")
_METRICS = {"eval_accuracy": "eval_token_accuracy"}
_TRACKERS = get_args(TrackerName)
_OFFLINE = ("local", "offline")


def _length(given: GivenArguments) -> Settings:
    if given["output_dir"] is None:
        raise RefusedError("output_dir", "is missing; name the folder of the run")
    if given["max_steps"] > 0:
        return {"train.max_steps": given["max_steps"]}
    if given["streaming"]:
        message = "is needed with streaming, as the length of an epoch is not known before"
        raise RefusedError("max_steps", message)
    return {}


def _precision(given: GivenArguments) -> Settings:
    if given["bf16"] and given["fp16"]:
        raise RefusedError("fp16", "excludes bf16; remove one of the two")
    if given["bf16"] or given["pure_bf16"]:
        return {"train.precision": "bf16"}
    return {"train.precision": "fp16" if given["fp16"] else "fp32"}


def _logs(given: GivenArguments) -> Settings:
    strategy = given["logging_strategy"]
    if strategy == "epoch":
        return {"train.log_steps": None, "train.log_epoch": True}
    return {"train.log_steps": _interval(given, "logging_steps") if strategy == "steps" else None}


def _interval(given: GivenArguments, name: str) -> int:
    """Steps; below 1 a share of all, which must be known."""
    value: float = given[name]
    if value <= 0:
        raise RefusedError(name, f"must be positive, got {value:g}")
    if value >= 1:
        if value % 1:
            raise RefusedError(name, f"expected a whole number of steps, got {value:g}")
        return int(value)
    if given["max_steps"] <= 0:
        message = f"{value:g} is a share of all steps; set max_steps, or write a number of steps"
        raise RefusedError(name, message)
    return math.ceil(int(given["max_steps"]) * value)


def eval_strategy(given: GivenArguments) -> str:
    """When to evaluate, by its present or former name."""
    former = given["evaluation_strategy"]
    return str(given["eval_strategy"] if given["eval_strategy"] != "no" else former)


def _evaluations(given: GivenArguments) -> Settings:
    strategy = eval_strategy(given)
    if strategy == "epoch":
        return {"train.eval_epoch": True}
    if strategy == "no":
        return {}
    if not given["val_size"] and not given["eval_dataset"]:
        message = f"{strategy}: nothing to evaluate on; set val_size or eval_dataset"
        raise RefusedError("eval_strategy", message)
    name = "logging_steps" if given["eval_steps"] is None else "eval_steps"
    return {"train.eval_steps": _interval(given, name)}


def _best(given: GivenArguments) -> Settings:
    name = given["metric_for_best_model"]
    if name is None:
        return {}
    full = name if name.startswith("eval_") else f"eval_{name}"
    return {"train.metric_for_best_model": _METRICS.get(full, full)}


def _trackers(given: GivenArguments) -> Settings:
    """``use_swanlab`` has settings of its own, of which the general ones come first."""
    names = [name for name in given["report_to"] if name in _TRACKERS]
    found = given.of("project", "run_name")
    mode = given["swanlab_mode"]
    if given["use_swanlab"] and mode != "disabled":
        names = list(dict.fromkeys([*names, "swanlab"]))
        of_swanlab = {"project": given["swanlab_project"], "run_name": given["swanlab_run_name"]}
        found = {name: value for name, value in of_swanlab.items() if value is not None} | found
    settings: Settings = {f"train.{name}": value for name, value in found.items()}
    if names:
        settings["train.report_to"] = names
    if "swanlab" in names and mode in _OFFLINE:
        settings["train.report_offline"] = True
    return settings


def _saves(given: GivenArguments) -> Settings:
    strategy = given["save_strategy"]
    found: Settings = {"checkpoint.keep": given["save_total_limit"], "checkpoint.save_steps": None}
    if strategy == "best":
        strategy = eval_strategy(given)
        if strategy == "no":
            raise RefusedError("save_strategy", "best needs eval_strategy")
        if strategy == "steps":
            return found | {"checkpoint.save_steps": _evaluations(given)["train.eval_steps"]}
    if strategy == "steps":
        return found | {"checkpoint.save_steps": _interval(given, "save_steps")}
    return found | ({"checkpoint.save_epoch": True} if strategy == "epoch" else {})


def _uploads(given: GivenArguments) -> Settings:
    if not given["push_to_hub"]:
        return {}
    name, is_private = given["hub_model_id"], given["hub_private_repo"]
    if name is None or not is_repository_name(name):
        found = "is missing" if name is None else f"got {name!r}"
        message = f"{found}; name the repository to upload to, as owner/name"
        raise RefusedError("hub_model_id", message)
    strategy = given["hub_strategy"]
    strategy = "all_checkpoints" if strategy == "checkpoint" else strategy
    settings: Settings = {"train.push_to_hub": name, "train.hub_strategy": strategy}
    return settings if is_private is None else settings | {"train.hub_private_repo": is_private}


def _resume(given: GivenArguments) -> Settings:
    place = given["resume_from_checkpoint"]
    if place is None or place.lower() in ("true", "false", "none", "null", ""):
        return {}
    return {"checkpoint.resume": place}


def _generation(given: GivenArguments) -> Settings:
    """If one of them is set, all are: the others with their defaults there. So it is where
    responses are generated without any of them."""
    if not given.sets(*_GENERATING, "max_length") and not given["predict_with_generate"]:
        return {}
    found = {f"generate.{name}": given[name] for name in _GENERATING}
    if given.sets("max_length") and not given.sets("max_new_tokens"):
        found["generate.max_new_tokens"] = given["max_length"]
    if given["temperature"] == 0:
        found |= {"generate.do_sample": False, "generate.temperature": 1.0}
    return found


TRAIN = (
    ("max_steps", _length),
    ("bf16", _precision),
    ("logging_steps", _logs),
    ("eval_strategy", _evaluations),
    ("metric_for_best_model", _best),
    ("report_to", _trackers),
    ("save_strategy", _saves),
    ("resume_from_checkpoint", _resume),
    ("push_to_hub", _uploads),
    ("max_new_tokens", _generation),
)
