"""The section ``model``."""

from __future__ import annotations

from ..arguments.argument import RefusedArgumentError
from ..given import GivenArguments, Settings, one_of

_ATTENTION = {"auto": "auto", "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2"}


def _hub(given: GivenArguments) -> Settings:
    """The revision, and the hub that the environment chooses."""
    found: Settings = {}
    if not given["model_name_or_path"]:
        raise RefusedArgumentError("model_name_or_path", "is missing; name a model")
    if given["model_revision"] != "main":
        found["model.revision"] = given["model_revision"]
    if given.is_on("USE_MODELSCOPE_HUB"):
        found["model.hub"] = "modelscope"
    if given.is_on("USE_OPENMIND_HUB"):
        message = "USE_OPENMIND_HUB is set, which is not read; download the model, and unset it"
        raise RefusedArgumentError("model_name_or_path", message)
    return found


def _adapters(given: GivenArguments) -> Settings:
    """All but the last are merged into the base there, and frozen here."""
    adapters = given["adapter_name_or_path"]
    if not adapters:
        return {}
    if given["finetuning_type"] != "lora":
        message = "needs finetuning_type: lora; merge it first with `surefoot export`"
        raise RefusedArgumentError("adapter_name_or_path", message)
    frozen = adapters if given["create_new_adapter"] else adapters[:-1]
    found: Settings = {"model.frozen_adapters": frozen} if frozen else {}
    if not given["create_new_adapter"]:
        found["model.adapter"] = adapters[-1]
    return found


def _dtype(given: GivenArguments) -> Settings:
    """BAdam trains weights in half precision there, with a float32 copy of its block."""
    is_half = given["pure_bf16"] or (given["use_badam"] and given["bf16"])
    return {"model.dtype": "bfloat16"} if is_half else {}


def _attention(given: GivenArguments) -> Settings:
    instead = "fa2 is the latest one; write one of"
    kernel = one_of(given, "flash_attn", _ATTENTION, instead)
    return {} if kernel == "auto" else {"model.attention": kernel}


def _positions(given: GivenArguments) -> Settings:
    kind = given["rope_scaling"]
    if kind is None:
        return {}
    if kind == "dynamic":
        message = "dynamic depends on the length of each text; write yarn, linear or llama3"
        raise RefusedArgumentError("rope_scaling", message)
    return {"model.rope_scaling": kind, "model.max_positions": given["cutoff_len"]}


def _shifted(given: GivenArguments) -> Settings:
    group = max(1, given["cutoff_len"] // 4)
    return {"model.shifted_attention_group": group} if given["shift_attn"] else {}


def _recomputation(given: GivenArguments) -> Settings:
    if given["use_unsloth_gc"]:
        return {"model.gradient_checkpointing": "offload"}
    is_on = given["gradient_checkpointing"] or given["activation_checkpointing"]
    is_off = given["disable_gradient_checkpointing"] and not is_on
    return {"model.gradient_checkpointing": "none" if is_off else "full"}


def _bits(given: GivenArguments) -> Settings:
    bits = given["quantization_bit"]
    if bits is None:
        return {}
    if bits not in (4, 8):
        raise RefusedArgumentError("quantization_bit", f"expected 4 or 8, got {bits}")
    if given["finetuning_type"] not in ("lora", "oft"):
        message = "needs finetuning_type: lora, as weights of 4 or 8 bits cannot be trained"
        raise RefusedArgumentError("quantization_bit", message)
    found: Settings = {"model.quantization_bit": bits}
    if bits == 4 and given.sets("double_quantization"):
        found["model.double_quantization"] = given["double_quantization"]
    return found


def _float8(given: GivenArguments) -> Settings:
    return {"model.float8": "rowwise"} if given["fp8"] else {}


MODEL = (
    ("model_revision", _hub),
    ("adapter_name_or_path", _adapters),
    ("pure_bf16", _dtype),
    ("flash_attn", _attention),
    ("rope_scaling", _positions),
    ("shift_attn", _shifted),
    ("disable_gradient_checkpointing", _recomputation),
    ("quantization_bit", _bits),
    ("fp8", _float8),
)
