"""The section ``model``."""

from __future__ import annotations

from ..arguments import RefusedError
from ..given import GivenArguments, Settings

_ATTENTION = {"auto": "auto", "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2"}


def _hub(given: GivenArguments) -> Settings:
    """The revision, and the hub that the environment chooses."""
    if not given["model_name_or_path"]:
        raise RefusedError("model_name_or_path", "is missing; name a model")
    if given.is_on("USE_OPENMIND_HUB"):
        message = "USE_OPENMIND_HUB is set, which is not read; download the model, and unset it"
        raise RefusedError("model_name_or_path", message)
    revision = given["model_revision"]
    found: Settings = {} if revision == "main" else {"model.revision": revision}
    return found | ({"model.hub": "modelscope"} if given.is_on("USE_MODELSCOPE_HUB") else {})


def _adapters(given: GivenArguments) -> Settings:
    """All but the last are merged into the base there, and frozen here."""
    adapters = given["adapter_name_or_path"]
    if not adapters:
        return {}
    if given["finetuning_type"] != "lora":
        message = "needs finetuning_type: lora; merge it first with `surefoot export`"
        raise RefusedError("adapter_name_or_path", message)
    is_new = given["create_new_adapter"]
    frozen = adapters if is_new else adapters[:-1]
    found: Settings = {"model.frozen_adapters": frozen} if frozen else {}
    return found | ({} if is_new else {"model.adapter": adapters[-1]})


def _weights(given: GivenArguments) -> Settings:
    """BAdam trains weights in half precision there, with a float32 copy of its block."""
    is_half = given["pure_bf16"] or (given["use_badam"] and given["bf16"])
    found: Settings = {"model.dtype": "bfloat16"} if is_half else {}
    found |= {"model.float8": "rowwise"} if given["fp8"] else {}
    instead = "fa2 is the latest one; write one of"
    kernel = given.one_of("flash_attn", _ATTENTION, instead)
    return found | ({} if kernel == "auto" else {"model.attention": kernel})


def _positions(given: GivenArguments) -> Settings:
    kind, length = given["rope_scaling"], given["cutoff_len"]
    if kind == "dynamic":
        message = "dynamic depends on the length of each text; write yarn, linear or llama3"
        raise RefusedError("rope_scaling", message)
    found: Settings = {}
    if kind is not None:
        found = {"model.rope_scaling": kind, "model.max_positions": length}
    group = {"model.shifted_attention_group": max(1, length // 4)}
    return found | (group if given["shift_attn"] else {})


def _recomputation(given: GivenArguments) -> Settings:
    is_on = given["gradient_checkpointing"] or given["activation_checkpointing"]
    is_off = given["disable_gradient_checkpointing"] and not is_on
    kind = "offload" if given["use_unsloth_gc"] else "none" if is_off else "full"
    return {"model.gradient_checkpointing": kind}


def _bits(given: GivenArguments) -> Settings:
    bits = given["quantization_bit"]
    if bits is None:
        return {}
    if bits not in (4, 8):
        raise RefusedError("quantization_bit", f"expected 4 or 8, got {bits}")
    if given["finetuning_type"] not in ("lora", "oft"):
        message = "needs finetuning_type: lora, as weights of 4 or 8 bits cannot be trained"
        raise RefusedError("quantization_bit", message)
    found: Settings = {"model.quantization_bit": bits}
    if bits == 4 and given.sets("double_quantization"):
        found["model.double_quantization"] = given["double_quantization"]
    return found


MODEL = (
    ("model_revision", _hub),
    ("adapter_name_or_path", _adapters),
    ("flash_attn", _weights),
    ("rope_scaling", _positions),
    ("disable_gradient_checkpointing", _recomputation),
    ("quantization_bit", _bits),
)
