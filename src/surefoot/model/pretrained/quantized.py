"""A frozen base in 4 or 8 bits (QLoRA, arXiv:2305.14314), through bitsandbytes: a fraction of the
memory, while an adapter learns beside it in full precision.

Only what is held in memory is quantized, each time from the same files to the same bits.
Checkpoints hold the adapter, and a merge takes the base as its files have it.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from math import prod

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from ...errors import ModelError, RecipeError
from ..section import ModelSection

REQUIREMENT = "bitsandbytes>=0.48"  # what pyproject.toml's extra ``qlora`` asks for


def quantization(section: ModelSection) -> BitsAndBytesConfig | None:
    """What transformers is told of it; None if the base is held as it is.

    Raises:
        ModelError: bitsandbytes is not installed.
    """
    if section.quantization_bit is None:
        return None
    if find_spec("bitsandbytes") is None:
        raise ModelError(
            f"model.quantization_bit: {section.quantization_bit} needs bitsandbytes, which is not "
            f"installed: `pip install '{REQUIREMENT}'`"
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
    """Raise ``RecipeError`` if several processes would share a quantized base."""
    if section.quantization_bit is not None and num_processes > 1:
        raise RecipeError(
            f"model.quantization_bit: a quantized base learns in one process, not {num_processes}; "
            "start one, or leave quantization_bit unset and let the processes share the weights"
        )


def disable_relayout(model: nn.Module) -> None:
    """Let no evaluation on a CPU lay the base out anew, as bitsandbytes does where it finds AVX512:
    that rounds the scales, so what is learnt afterwards would not be what a resume learns."""
    for module in model.modules():
        if "support_avx512bf16_for_cpu" in vars(module):
            vars(module)["support_avx512bf16_for_cpu"] = False


def num_elements(parameter: nn.Parameter) -> int:
    """How many numbers a parameter holds; several of 4 bits lie in one element."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else prod(state.shape)
