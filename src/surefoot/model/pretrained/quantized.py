"""A frozen base in 4 or 8 bits (QLoRA, arXiv:2305.14314), through bitsandbytes: a fraction of the
memory, while an adapter is trained in full precision.

Only the copy in memory is quantized, each time from the same files to the same bits. Checkpoints
contain the adapter, and a merge uses the base from its files.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from ...errors import ModelError, RecipeError, installation
from ..section import ModelSection


def quantization(section: ModelSection) -> BitsAndBytesConfig | None:
    """The quantization settings for transformers; None without quantization. Raises ``ModelError``:
    bitsandbytes is not installed."""
    if section.quantization_bit is None:
        return None
    if find_spec("bitsandbytes") is None:
        raise ModelError(
            f"model.quantization_bit: {section.quantization_bit} needs bitsandbytes, which is not "
            f"installed: `{installation('bitsandbytes')}`"
        )
    if section.quantization_bit == 8:
        # it would say at every product that it casts what comes in
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        return BitsAndBytesConfig(load_in_8bit=True)
    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=section.quantization_type,
        bnb_4bit_use_double_quant=section.double_quantization,
        bnb_4bit_compute_dtype=torch.bfloat16 if has_bf16 else torch.float32,
    )


def check_alone(section: ModelSection, num_processes: int) -> None:
    """Raise ``RecipeError`` if several ranks would use a quantized base."""
    if section.quantization_bit is not None and num_processes > 1:
        raise RecipeError(
            "model.quantization_bit: a quantized base can be trained on one rank only, not on "
            f"{num_processes}; start one, or leave quantization_bit unset and shard the weights"
        )


def disable_relayout(model: nn.Module) -> None:
    """Keep evaluations on a CPU from changing the layout of the base, as bitsandbytes does with
    AVX512: that rounds the scales, and a resumed run would differ."""
    for module in model.modules():
        if "support_avx512bf16_for_cpu" in vars(module):
            vars(module)["support_avx512bf16_for_cpu"] = False


def dequantized(layer: Any) -> torch.Tensor:
    """A linear layer's weight, in values. PEFT's own function also moves an 8-bit weight, which
    loses its scales if it is on a CPU."""
    from peft.utils.integrations import dequantize_bnb_weight, dequantize_module_weight

    weight: torch.Tensor = layer.weight
    if type(weight).__name__ in ("Params4bit", "Int8Params"):
        weight = dequantize_bnb_weight(weight, state=getattr(layer, "state", None))
    else:
        weight = dequantize_module_weight(layer)
    return weight.detach()


def num_elements(parameter: nn.Parameter) -> int:
    """The number of values of a parameter; several 4-bit values are in one element."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else prod(state.shape)
