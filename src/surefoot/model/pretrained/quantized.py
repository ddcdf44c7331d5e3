"""A frozen base in 4 or 8 bits (QLoRA, arXiv:2305.14314), through bitsandbytes: a fraction of the
memory, while an adapter is trained in full precision.

Only the copy in memory is quantized, each time from the same files to the same bits. Checkpoints
contain the adapter, and a merge uses the base from its files.

Models whose files contain quantized weights: which are read, and as what.

Those that transformers dequantizes without a kernel of its own, and the ``FORMS`` that are
dequantized here, are read in full precision, and trained through an adapter. All others are refused
by name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, FineGrainedFP8Config, Mxfp4Config, PretrainedConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...errors import ModelError, RecipeError, installation
from ..quantization import FORMS, Form
from ..section import ModelSection

_ADVICE = (
    "Take the model that they were made from, with model.quantization_bit: 4 if memory is short"
)
# What dequantizes the weights in transformers, by the name in ``config.json``.
DEQUANTIZED = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}


def quantization_of(config: PretrainedConfig) -> str | None:
    """How the weights of a model are quantized in its files: ``quant_method`` of a configuration;
    None if they are not."""
    if not (settings := _settings(config)):
        return None
    method = settings.get("quant_method", "an unnamed form")
    return str(getattr(method, "value", method))


def dequantization(
    config: PretrainedConfig, section: ModelSection, folder: Path
) -> QuantizationConfigMixin | None:
    """What makes transformers read quantized weights in full precision; None if they are not
    quantized, or dequantized before. Raises ``ModelError`` for a form that is not read."""
    method = quantization_of(config)
    if method is None:
        return None
    if method not in DEQUANTIZED and form_of(config, folder) is None:
        *most, last = [*FORMS, *DEQUANTIZED]
        raise ModelError(
            f"model.path: the weights in {folder} are quantized ({method}), which is not read; "
            f"{', '.join(most)} and {last} are. {_ADVICE}"
        )
    if section.quantization_bit is not None:
        raise ModelError(
            f"model.quantization_bit: the weights in {folder} are quantized already ({method}); "
            "leave it unset, and they are read in full precision"
        )
    return DEQUANTIZED[method](dequantize=True) if method in DEQUANTIZED else None


def form_of(config: PretrainedConfig, folder: Path) -> Form | None:
    """The form of quantized weights that are dequantized here; None for all others. Raises
    ``ModelError`` for settings that are not read."""
    method = quantization_of(config)
    if method is None or method not in FORMS:
        return None
    try:
        return FORMS[method].of(_settings(config))
    except ModelError as error:
        raise ModelError(
            f"model.path: the weights in {folder} are quantized ({method}) in a way that is not "
            f"read: {error}. {_ADVICE}"
        ) from None


def as_dequantized(config: PretrainedConfig) -> PretrainedConfig:
    """``config`` as it was before its weights got one of the ``FORMS``."""
    if quantization_of(config) in FORMS:
        del config.quantization_config
    return config


def refuse_own_weights(config: PretrainedConfig, folder: Path) -> None:
    """Raise ``RecipeError`` if a method would train, and save, weights that are quantized."""
    if (method := quantization_of(config)) is not None:
        raise RecipeError(
            f"model.path: the weights in {folder} are quantized ({method}); use method: lora, or "
            "take the model that they were made from"
        )


def refuse_uneven_blocks(
    config: PretrainedConfig, shapes: Mapping[str, Sequence[int]], folder: Path
) -> None:
    """Raise ``ModelError`` if the blocks of an fp8 matrix, which share a scale, are not all of one
    size. transformers derives the size from the number of scales, and would take wrong ones."""
    for name, count in shapes.items():
        weight = shapes.get(name.removesuffix("_scale_inv"), ())
        if not name.endswith("_scale_inv") or len(weight) < 2 or len(count) < 2:
            continue
        found = _settings(config).get("weight_block_size") or weight[-2:]
        along = zip(weight[-2:], count[-2:], found, strict=True)
        if any(blocks > 1 and size % block for size, blocks, block in along):
            raise ModelError(
                f"model.path: {name.removesuffix('_scale_inv')} in {folder} has the shape "
                f"{list(weight)}, which fp8 blocks of {found[0]} x {found[1]} do not divide: "
                "transformers would read it wrongly. Take the model that it was made from"
            )


def _settings(config: PretrainedConfig) -> Mapping[str, Any]:
    """The settings of a model's quantization; empty without one."""
    found = getattr(config, "quantization_config", None) or {}
    return found if isinstance(found, Mapping) else vars(found)


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
