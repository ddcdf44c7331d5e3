"""The section ``method``."""

from __future__ import annotations

from ..arguments import RefusedError
from ..given import GivenArguments, Settings


def _full(given: GivenArguments) -> Settings:
    if not given["use_badam"]:
        return {"method": "full"}
    if given["badam_mode"] == "ratio":
        section = "method.badam_ratio."
        ratio, mask = given["badam_update_ratio"], given["badam_mask_mode"]
        return {f"{section}update_ratio": ratio, f"{section}mask": mask}
    section, interval = "method.badam.", given["badam_switch_interval"]
    start, order = given["badam_start_block"], given["badam_switch_mode"]
    if interval == -1:  # their word for never
        return {f"{section}order": "fixed", f"{section}start_block": start or 0}
    found: Settings = {f"{section}order": order, f"{section}switch_interval": interval}
    is_used = start is not None and order != "random"
    return found | ({f"{section}start_block": start} if is_used else {})


def _freeze(given: GivenArguments) -> Settings:
    return {
        "method.freeze.num_layers": given["freeze_trainable_layers"],
        "method.freeze.modules": given["freeze_trainable_modules"],
    } | given.on("method.freeze", {"extra_modules": "freeze_extra_modules"})


def _lora(given: GivenArguments) -> Settings:
    """An adapter that is trained further has its own settings, there and here."""
    if given["adapter_name_or_path"] and not given["create_new_adapter"]:
        return {"method": "lora"}
    names = {"alpha": "lora_alpha", "dropout": "lora_dropout", "rslora": "use_rslora"}
    names |= {"modules_to_save": "additional_target", "dora": "use_dora"}
    found = given.on("method.lora", names)
    found |= {"method.lora.rank": given["lora_rank"], "method.lora.targets": given["lora_target"]}
    if given["pissa_init"]:
        found["method.lora.init"] = "pissa"
        found["method.lora.init_iterations"] = max(0, given["pissa_iter"])  # -1 is none
    return found


def _oft(given: GivenArguments) -> Settings:
    found = given.on("method.oft", {"dropout": "module_dropout"})
    found |= given.on("method.oft", {"modules_to_save": "additional_target"})
    size, targets = given["oft_block_size"], given["oft_target"]
    return found | {"method.oft.block_size": size, "method.oft.targets": targets}


_METHODS = {"full": _full, "freeze": _freeze, "lora": _lora, "oft": _oft}


def _method(given: GivenArguments) -> Settings:
    kind = given["finetuning_type"]
    for name in ("use_dora", "use_rslora", "pissa_init", "loraplus_lr_ratio"):
        if given[name] and kind != "lora":
            raise RefusedError(name, f"needs finetuning_type: lora, not {kind}")
    if kind != "full" and given["use_badam"]:
        raise RefusedError("use_badam", f"needs finetuning_type: full, not {kind}")
    return _METHODS[kind](given)


METHOD = (("finetuning_type", _method),)
