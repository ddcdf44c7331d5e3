"""The formats of ``--quantize``, and the type of each tensor in them: the mixes of llama.cpp.

Rules and names are those of ``llama_tensor_get_type_impl`` in ``llama-quant.cpp``, without an
importance matrix; those of the float formats are of ``convert_hf_to_gguf.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

T = GGMLQuantizationType
_LAYER = re.compile(r"blk\.(\d+)\.")
# The type for a row length that a type cannot hold; last of all F16, which holds any.
_FALLBACKS = {T.Q4_K: T.Q5_0, T.Q5_K: T.Q5_1, T.Q6_K: T.Q8_0}


@dataclass(frozen=True)
class Format:
    """One value of ``--quantize``."""

    file_type: LlamaFileType
    main: GGMLQuantizationType
    mix: str = ""  # which tensors get more bits: M or S
    description: str = ""


F = LlamaFileType
FORMATS: Mapping[str, Format] = {
    "f32": Format(F.ALL_F32, T.F32, "", "float32 weights are unchanged"),
    "f16": Format(F.MOSTLY_F16, T.F16, "", "11 bits of precision"),
    "bf16": Format(F.MOSTLY_BF16, T.BF16, "", "bfloat16 weights are unchanged"),
    "q8_0": Format(F.MOSTLY_Q8_0, T.Q8_0, "", "nearly as exact as f16"),
    "q6_k": Format(F.MOSTLY_Q6_K, T.Q6_K, "", ""),
    "q5_k_m": Format(F.MOSTLY_Q5_K_M, T.Q5_K, "M", "Q6_K in half of `attn_v` and `ffn_down`"),
    "q5_k_s": Format(F.MOSTLY_Q5_K_S, T.Q5_K, "S", ""),
    "q4_k_m": Format(
        F.MOSTLY_Q4_K_M, T.Q4_K, "M", "Q6_K in half of `attn_v` and `ffn_down`; the usual choice"
    ),
    "q4_k_s": Format(F.MOSTLY_Q4_K_S, T.Q4_K, "S", "Q5_K in some of the first layers"),
    "q5_0": Format(F.MOSTLY_Q5_0, T.Q5_0, "", "older, blocks of 32"),
    "q4_0": Format(F.MOSTLY_Q4_0, T.Q4_0, "", "older, blocks of 32"),
}


@dataclass(frozen=True)
class LayerCounts:
    """What the mixes depend on besides a tensor's name."""

    num_layers: int
    num_experts: int = 0
    is_tied: bool = False  # no output.weight
    is_70b: bool = False  # many query heads share one of attn_v


def tensor_type(name: str, shape: tuple[int, ...], format_: Format, model: LayerCounts) -> T:
    """The type of the tensor ``name``, of ``shape`` (rows last), before any fallback."""
    is_kept = len(shape) < 2 or not name.endswith("weight") or "_norm.weight" in name
    if is_kept or "ffn_gate_inp.weight" in name:
        return T.F32
    if format_.main in (T.F32, T.F16, T.BF16):
        return format_.main
    if name == "output.weight" or (model.is_tied and name == "token_embd.weight"):
        return _of_output(shape, format_.main)
    return _of_layer(name, format_, model)


def fitting(kind: T, columns: int) -> T:
    """``kind``, or the type that llama.cpp takes where a row of ``columns`` does not fit."""
    for candidate in (kind, _FALLBACKS.get(kind, T.F16), T.F16):
        if columns % GGML_QUANT_SIZES[candidate][0] == 0:
            return candidate
    raise AssertionError("F16 has blocks of one")


def _of_output(shape: tuple[int, ...], main: T) -> T:
    if shape[-1] % GGML_QUANT_SIZES[main][0] or main == T.Q8_0:
        return T.Q8_0
    return T.Q6_K


def _of_layer(name: str, format_: Format, model: LayerCounts) -> T:
    found, main = _LAYER.match(name), format_.main
    layer, count = int(found[1]) if found else -1, model.num_layers
    if "attn_v.weight" in name or "attn_qkv.weight" in name:
        return _of_values(layer, format_, model)
    if "attn_k.weight" in name and model.num_experts == 8:
        return T.Q8_0
    if "attn_output.weight" in name and model.num_experts == 8 and main == T.Q4_K:
        return T.Q5_K
    if "ffn_down" in name:
        if format_.mix == "M" and _has_more_bits(layer, count):
            return T.Q6_K
        if format_.mix == "S" and main == T.Q4_K and layer < count // 8:
            return T.Q5_K
    return main


def _of_values(layer: int, format_: Format, model: LayerCounts) -> T:
    kind = format_.main
    if format_.mix == "M" and _has_more_bits(layer, model.num_layers):
        kind = T.Q6_K
    elif format_.mix == "S" and kind == T.Q4_K and layer < 4:
        kind = T.Q5_K
    if model.is_70b and kind == T.Q4_K:
        kind = T.Q5_K
    return T.Q8_0 if model.num_experts == 8 else kind


def _has_more_bits(layer: int, count: int) -> bool:
    """The first and last eighth of the layers, and every third between."""
    return layer < count // 8 or layer >= 7 * count // 8 or (layer - count // 8) % 3 == 2
