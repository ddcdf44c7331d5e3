"""Which optimizer and schedule of this program LLaMA-Factory's arguments mean, and with which
settings. ``llamafactory`` has both functions among its rules.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from ...optim import OPTIMIZERS
from ...optim.optimizer import ON_PLATEAU
from ...optim.plateau import Plateau
from .arguments import RefusedError
from .rules import GivenArguments, Settings

_OPTIMIZERS = {  # by the name here, those of transformers
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
_NAMES = {theirs: name for name, names in _OPTIMIZERS.items() for theirs in names.split()}
_PAGED = ("paged_adamw", "paged_adamw_32bit", "paged_adamw_8bit")
_OF_ADAM = {  # names here; Muon's AdamW has them with a prefix
    "weight_decay": ("weight_decay",),
    "adam_beta1": ("beta1", "adamw_beta1"),
    "adam_beta2": ("beta2", "adamw_beta2"),
    "adam_epsilon": ("epsilon", "adamw_epsilon"),
}
_SCHEDULES = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"),
    *("inverse_sqrt", "cosine_with_min_lr", "warmup_stable_decay", ON_PLATEAU),
)
_WITHOUT_WARMUP = ("constant", ON_PLATEAU)  # there
_OF_PLATEAU = [field.name for field in fields(Plateau)]
_NO_SCHEDULES = {
    "cosine_warmup_with_min_lr": "the warmup starts from the first step's share; write "
    "cosine_with_min_lr",
}


def optimizer(arguments: GivenArguments) -> Settings:
    """The optimizer, with the settings that all share, its own, and the schedule."""
    name = optimizer_name(arguments)
    defaults = {field.name: field.default for field in fields(OPTIMIZERS[name])}
    settings: Settings = {"learning_rate": arguments["learning_rate"]}
    for argument, names in _OF_ADAM.items():
        for here in names:
            if here in defaults and arguments[argument] != defaults[here]:
                settings[here] = arguments[argument]
    if arguments["loraplus_lr_ratio"] is not None:
        settings["learning_rates"] = {"lora_B": arguments["loraplus_lr_ratio"]}
    # Its blocks are trained in float32 there, above weights in half precision.
    if arguments["use_badam"] and (arguments["bf16"] or arguments["pure_bf16"]):
        settings["bf16_weights"] = "master"
    # Not on several ranks: offload_state is for complete parameters, and theirs may be sharded.
    if arguments["optim"] in _PAGED and arguments.num_ranks == 1:
        settings["offload_state"] = True
    if name in ("galore", "apollo"):
        settings["rank"] = arguments[f"{name}_rank"]
        settings["update_gap"] = arguments[f"{name}_update_interval"]
        settings["scale"] = arguments[f"{name}_scale"]
    if name == "apollo":
        settings["scaling"] = arguments["apollo_scale_type"]
    settings |= _schedule(arguments)
    return {f"optim.{name}.{setting}": value for setting, value in settings.items()}


def optimizer_name(arguments: GivenArguments) -> str:
    """The optimizer's name here. Their switches have precedence over ``optim``."""
    switches = ["galore", "apollo"]
    # The order in which LLaMA-Factory makes its optimizer: LoRA+ and BAdam come before these two.
    if not arguments["use_badam"] and arguments["loraplus_lr_ratio"] is None:
        switches += ["adam_mini", "muon"]
    if name := next((name for name in switches if arguments[f"use_{name}"]), None):
        return name
    instead = "write use_galore or use_apollo for these, or one of"
    return str(arguments.one_of("optim", _NAMES, instead))


def _schedule(arguments: GivenArguments) -> Settings:
    """The schedule's name and settings, with the warmup. ``ignored`` are values of
    ``lr_scheduler_kwargs`` that are as here."""
    kind, kwargs = arguments["lr_scheduler_type"], dict(arguments["lr_scheduler_kwargs"] or {})
    if kind not in _SCHEDULES:
        message = f"{kind} is not supported: {_NO_SCHEDULES[kind]}"
        raise RefusedError("lr_scheduler_type", message)
    settings, ignored = dict[str, object](schedule=kind), dict[str, object]()
    match kind:
        case "cosine":
            ignored = {"num_cycles": 0.5}
        case "cosine_with_restarts":  # is cosine, if there is one cycle
            settings, ignored = {"schedule": "cosine"}, {"num_cycles": 1}
        case "constant_with_warmup":
            settings = {"schedule": "constant"}
        case "polynomial":  # of the first power: a line to lr_end
            lowest = kwargs.pop("lr_end", 1e-7) / arguments["learning_rate"]
            settings, ignored = {"schedule": "linear", "min_lr_ratio": lowest}, {"power": 1}
        case "cosine_with_min_lr":
            rate, lowest = kwargs.pop("min_lr_rate", None), kwargs.pop("min_lr", None)
            rate = rate if lowest is None else lowest / arguments["learning_rate"]
            if rate is None:
                message = "cosine_with_min_lr needs min_lr or min_lr_rate"
                raise RefusedError("lr_scheduler_kwargs", message)
            settings = {"schedule": "cosine", "min_lr_ratio": rate}
        case "warmup_stable_decay":
            settings, ignored = {"schedule": "wsd_cosine"}, {"decay_type": "cosine"}
            if (rate := kwargs.pop("min_lr_ratio", None)) is not None:
                settings["min_lr_ratio"] = rate
            settings["decay_ratio"] = _decay_ratio(arguments, kwargs)
        case "reduce_lr_on_plateau":
            settings |= _plateau(arguments, kwargs)
            ignored = {"mode": _mode(arguments), "eps": 1e-8}
    for name, value in kwargs.items():
        if name not in ignored or ignored[name] != value:
            supported = "min_lr, min_lr_rate, lr_end, or their defaults"
            if kind == ON_PLATEAU:
                supported = f"min_lr, {', '.join(_OF_PLATEAU)}, or mode {ignored['mode']}"
            message = f"{name} is not supported; expected {supported}"
            raise RefusedError("lr_scheduler_kwargs", message)
    return settings if kind in _WITHOUT_WARMUP else settings | _warmup(arguments)


def _plateau(arguments: GivenArguments, kwargs: dict[str, Any]) -> Settings:
    """The settings of torch's ``ReduceLROnPlateau``, which are removed from ``kwargs``."""
    settings: Settings = {f"plateau.{n}": kwargs.pop(n) for n in _OF_PLATEAU if n in kwargs}
    lowest = kwargs.pop("min_lr", 0)
    if not isinstance(lowest, int | float):
        message = "min_lr is not supported as a list of groups; expected one number"
        raise RefusedError("lr_scheduler_kwargs", message)
    return settings | ({"min_lr_ratio": lowest / arguments["learning_rate"]} if lowest else {})


def _mode(arguments: GivenArguments) -> str:
    """Torch's name of the direction in which the metric improves."""
    greater = arguments["greater_is_better"]
    if greater is None:
        # As transformers has it, by the name of the metric.
        greater = not (arguments["metric_for_best_model"] or "loss").endswith("loss")
    return "max" if greater else "min"


def _warmup(arguments: GivenArguments) -> dict[str, float]:
    """Steps, or a share of all. Steps have precedence."""
    steps = arguments["warmup_steps"]
    if steps >= 1:
        return {"warmup_steps": int(steps)}
    share = steps or arguments["warmup_ratio"]
    return {"warmup_ratio": share} if share else {}


def _decay_ratio(arguments: GivenArguments, kwargs: dict[str, Any]) -> float:
    """A third of the steps after warmup is stable, and the rest decays along a cosine."""
    total, warmup = arguments["max_steps"], _warmup(arguments)
    ratio = warmup.get("warmup_ratio", 0.0)
    if total <= 0:
        return (1 - ratio) * 2 / 3
    after = total - int(warmup.get("warmup_steps", math.ceil(ratio * total)))
    decay = kwargs.pop("num_decay_steps", after - after // 3)
    kwargs.pop("num_stable_steps", None)
    # Half a step less, as the steps are rounded up from this ratio again.
    return float(max(0, decay - 0.5) / total)
