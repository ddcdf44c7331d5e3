"""The section ``optim``: the optimizer, the learning rate and its schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from ....optim import OPTIMIZERS
from ..arguments import RefusedError
from ..given import GivenArguments, Settings

_SAME = {  # by the name here, those of transformers
    "adamw": "adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw_anyprecision "
    "paged_adamw paged_adamw_32bit",
    "adamw_8bit": "adamw_8bit adamw_bnb_8bit adamw_torch_8bit paged_adamw_8bit",
    "adamw_4bit": "adamw_torch_4bit",
    "lion": "lion lion_32bit lion_8bit paged_lion_32bit paged_lion_8bit",
    "ademamix": "ademamix ademamix_8bit paged_ademamix_32bit paged_ademamix_8bit",
    "adafactor": "adafactor",
    "schedule_free": "schedule_free_adamw",
    "muon": "muon",
}
_NAMES = {theirs: name for name, names in _SAME.items() for theirs in names.split()}
_PAGED = ("paged_adamw", "paged_adamw_32bit", "paged_adamw_8bit")
_SHARED = (  # theirs, and its names here
    ("weight_decay", ("weight_decay",)),
    ("adam_beta1", ("beta1", "adamw_beta1")),
    ("adam_beta2", ("beta2", "adamw_beta2")),
    ("adam_epsilon", ("epsilon", "adamw_epsilon")),
)


_PROJECTIONS = {  # by the optimizer, its settings and their arguments
    "galore": {
        "rank": "galore_rank",
        "update_gap": "galore_update_interval",
        "scale": "galore_scale",
    },
    "apollo": {
        "rank": "apollo_rank",
        "update_gap": "apollo_update_interval",
        "scale": "apollo_scale",
        "scaling": "apollo_scale_type",
    },
}


def optimizer_of(given: GivenArguments) -> str:
    """The optimizer's name here. Their switches have precedence over ``optim``."""
    for switch, name in (("use_galore", "galore"), ("use_apollo", "apollo")):
        if given[switch]:
            if given["finetuning_type"] == "lora":
                raise RefusedError(switch, "excludes LoRA; write finetuning_type: full")
            return name
    if not given["use_badam"] and given["loraplus_lr_ratio"] is None:
        for switch, name in (("use_adam_mini", "adam_mini"), ("use_muon", "muon")):
            if given[switch]:
                return name
    instead = "write use_galore or use_apollo for these, or one of"
    return str(given.one_of("optim", _NAMES, instead))


def _optimizer(given: GivenArguments) -> Settings:
    """The optimizer and the settings that all share."""
    name = optimizer_of(given)
    defaults = {field.name: field.default for field in fields(OPTIMIZERS[name])}
    found: Settings = {"learning_rate": given["learning_rate"]}
    for theirs, names in _SHARED:
        for ours in names:
            if ours in defaults and given[theirs] != defaults[ours]:
                found[ours] = given[theirs]
    if given["loraplus_lr_ratio"] is not None:
        found["learning_rates"] = {"lora_B": given["loraplus_lr_ratio"]}
    if given["use_badam"] and (given["bf16"] or given["pure_bf16"]):
        found["bf16_weights"] = "master"
    if given["optim"] in _PAGED and given.num_ranks == 1:
        found["offload_state"] = True
    found |= {here: given[theirs] for here, theirs in _PROJECTIONS.get(name, {}).items()}
    found |= _schedule(given)
    return {f"optim.{name}.{setting}": value for setting, value in found.items()}


def _schedule(given: GivenArguments) -> Settings:
    """The schedule's name and settings, with the warmup."""
    kind = given["lr_scheduler_type"]
    kwargs = dict(given["lr_scheduler_kwargs"] or {})
    if kind not in _SCHEDULES:
        message = f"{kind} is not supported: {_WHY[kind]}"
        raise RefusedError("lr_scheduler_type", message)
    found = _SCHEDULES[kind](given, kwargs)
    if kwargs:
        known = "min_lr, min_lr_rate, lr_end, or their defaults"
        message = f"{next(iter(kwargs))} is not supported; expected {known}"
        raise RefusedError("lr_scheduler_kwargs", message)
    return found | ({} if kind == "constant" else _warmup(given))


def _warmup(given: GivenArguments) -> Settings:
    """Steps, or a share of all. Steps have precedence."""
    steps, ratio = given["warmup_steps"], given["warmup_ratio"]
    for name, value in (("warmup_steps", steps), ("warmup_ratio", ratio or 0)):
        if value < 0:
            raise RefusedError(name, f"must not be negative, got {value:g}")
    if steps >= 1:
        return {"warmup_steps": int(steps)}
    share = steps or ratio
    return {"warmup_ratio": share} if share else {}


def _plain(name: str) -> Callable[[GivenArguments, dict[str, Any]], Settings]:
    def schedule(_given: GivenArguments, kwargs: dict[str, Any]) -> Settings:
        if name == "cosine" and kwargs.get("num_cycles") == 0.5:
            kwargs.pop("num_cycles")
        return {"schedule": name}

    return schedule


def _one_cycle(_given: GivenArguments, kwargs: dict[str, Any]) -> Settings:
    """Cosine with restarts is cosine, if there is one cycle."""
    if kwargs.get("num_cycles", 1) == 1:
        kwargs.pop("num_cycles", None)
    return {"schedule": "cosine"}


def _polynomial(given: GivenArguments, kwargs: dict[str, Any]) -> Settings:
    """Of the first power: a line to ``lr_end``."""
    if kwargs.get("power", 1) == 1:
        kwargs.pop("power", None)
    end = kwargs.pop("lr_end", 1e-7)
    return {"schedule": "linear", "min_lr_ratio": end / given["learning_rate"]}


def _min_rate(given: GivenArguments, kwargs: dict[str, Any]) -> Settings:
    lowest = kwargs.pop("min_lr", None)
    rate = kwargs.pop("min_lr_rate", None)
    if lowest is not None:
        rate = lowest / given["learning_rate"]
    if rate is None:
        message = "cosine_with_min_lr needs min_lr or min_lr_rate"
        raise RefusedError("lr_scheduler_kwargs", message)
    return {"schedule": "cosine", "min_lr_ratio": rate}


def _stable(given: GivenArguments, kwargs: dict[str, Any]) -> Settings:
    """A third of the steps after warmup is stable, and the rest decays along a cosine."""
    found: Settings = {"schedule": "wsd_cosine"}
    if (rate := kwargs.pop("min_lr_ratio", None)) is not None:
        found["min_lr_ratio"] = rate
    if kwargs.get("decay_type", "cosine") == "cosine":
        kwargs.pop("decay_type", None)
    total, warmup = given["max_steps"], _warmup(given)
    ratio, steps = warmup.get("warmup_ratio", 0.0), warmup.get("warmup_steps")
    assert isinstance(ratio, float)
    assert steps is None or isinstance(steps, int)
    if total <= 0:
        return found | {"decay_ratio": (1 - ratio) * 2 / 3}
    after = total - (math.ceil(ratio * total) if steps is None else steps)
    decay = kwargs.pop("num_decay_steps", after - after // 3)
    kwargs.pop("num_stable_steps", None)
    return found | {"decay_ratio": max(0, decay - 0.5) / total}


_SCHEDULES: dict[str, Callable[[GivenArguments, dict[str, Any]], Settings]] = {
    "linear": _plain("linear"),
    "cosine": _plain("cosine"),
    "cosine_with_restarts": _one_cycle,
    "polynomial": _polynomial,
    "constant": _plain("constant"),
    "constant_with_warmup": _plain("constant"),
    "inverse_sqrt": _plain("inverse_sqrt"),
    "cosine_with_min_lr": _min_rate,
    "warmup_stable_decay": _stable,
}
_WHY = {
    "reduce_lr_on_plateau": "a rate must be a function of the step, so that a resume has the same "
    "ones; write cosine",
    "cosine_warmup_with_min_lr": "the warmup starts from the first step's share; write "
    "cosine_with_min_lr",
}
OPTIM = (("optim", _optimizer),)
