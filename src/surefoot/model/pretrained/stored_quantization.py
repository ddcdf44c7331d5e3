"""Models whose files contain quantized weights: which are read, and as what.

Those that transformers dequantizes without a kernel of its own, and the ``FORMS`` that are
dequantized here, are read in full precision, and trained through an adapter. All others are refused
by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import FineGrainedFP8Config, Mxfp4Config, PretrainedConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...errors import ModelError, RecipeError
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
