"""The section ``method``."""

from __future__ import annotations

from collections.abc import Callable

from ..arguments.argument import RefusedArgumentError
from ..given import GivenArguments, Settings

_ONLY_LORA = ("use_dora", "use_rslora", "pissa_init", "loraplus_lr_ratio")


def _full(given: GivenArguments) -> Settings:
    if not given["use_badam"]:
        return {"method": "full"}
    if given["badam_mode"] == "ratio":
        section = "method.badam_ratio."
        return {
            f"{section}update_ratio": given["badam_update_ratio"],
            f"{section}mask": given["badam_mask_mode"],
        }
    section, interval = "method.badam.", given["badam_switch_interval"]
    found: Settings = {f"{section}order": given["badam_switch_mode"]}
    start = given["badam_start_block"]
    if interval == -1:  # their word for never
        return {f"{section}order": "fixed", f"{section}start_block": start or 0}
    if start is not None and given["badam_switch_mode"] != "random":
        found[f"{section}start_block"] = start
    return found | {f"{section}switch_interval": interval}


def _freeze(given: GivenArguments) -> Settings:
    found: Settings = {
        "method.freeze.num_layers": given["freeze_trainable_layers"],
        "method.freeze.modules": given["freeze_trainable_modules"],
    }
    if given["freeze_extra_modules"]:
        found["method.freeze.extra_modules"] = given["freeze_extra_modules"]
    return found


def _lora(given: GivenArguments) -> Settings:
    """An adapter that is trained further has its own settings, there and here."""
    if given["adapter_name_or_path"] and not given["create_new_adapter"]:
        return {"method": "lora"}
    section, iterations = "method.lora.", given["pissa_iter"]
    found: Settings = {
        f"{section}rank": given["lora_rank"],
        f"{section}targets": given["lora_target"],
    }
    if given["lora_alpha"]:
        found[f"{section}alpha"] = given["lora_alpha"]
    if given["lora_dropout"]:
        found[f"{section}dropout"] = given["lora_dropout"]
    if given["additional_target"]:
        found[f"{section}modules_to_save"] = given["additional_target"]
    for theirs, ours in (("use_rslora", "rslora"), ("use_dora", "dora")):
        if given[theirs]:
            found[f"{section}{ours}"] = True
    if given["pissa_init"]:
        found[f"{section}init"] = "pissa"
        found[f"{section}init_iterations"] = 0 if iterations == -1 else iterations
    return found


def _oft(given: GivenArguments) -> Settings:
    section = "method.oft."
    found: Settings = {
        f"{section}block_size": given["oft_block_size"],
        f"{section}targets": given["oft_target"],
    }
    if given["module_dropout"]:
        found[f"{section}dropout"] = given["module_dropout"]
    if given["additional_target"]:
        found[f"{section}modules_to_save"] = given["additional_target"]
    return found


METHODS: dict[str, Callable[[GivenArguments], Settings]] = {
    "full": _full,
    "freeze": _freeze,
    "lora": _lora,
    "oft": _oft,
}


def _method(given: GivenArguments) -> Settings:
    kind = given["finetuning_type"]
    if kind != "lora":
        for name in _ONLY_LORA:
            if given[name]:
                raise RefusedArgumentError(name, f"needs finetuning_type: lora, not {kind}")
    if kind != "full" and given["use_badam"]:
        raise RefusedArgumentError("use_badam", f"needs finetuning_type: full, not {kind}")
    return METHODS[kind](given)


METHOD = (("finetuning_type", _method),)
