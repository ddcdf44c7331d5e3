"""The formats of ``--quantize``, and the type of each tensor in them: the mixes of llama.cpp.

Rules and names are those of ``llama_tensor_get_type_impl`` in ``llama-quant.cpp``, without an
importance matrix; those of the float formats are of ``convert_hf_to_gguf.py``.

K-quants: blocks of 256 weights in 4, 5 or 6 bits, after the formulas of ggml's reference.

The layouts are those of ``ggml-common.h``, the searches those of ``make_qkx2_quants`` and
``make_qx_quants`` in ``ggml-quants.c`` (without an importance matrix), vectorised over blocks.
Shapes: N blocks, G groups of a block, S weights of a group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
BLOCK = 256
_TINY = 1e-15  # ggml's GROUP_MAX_EPS: smaller weights are all zero


def q4_k(weights: Floats) -> Bytes:
    """Rows of 144 bytes a block: 8 groups of 32, each with a scale and a minimum of 6 bits."""
    head, levels_NGS = _affine_blocks(weights, 15, -1.0, 20)
    return np.concatenate([head, _nibbles(levels_NGS)], axis=1)


def q5_k(weights: Floats) -> Bytes:
    """Rows of 176 bytes a block: as ``q4_k``, the fifth bits together before the lower four."""
    head, levels_NGS = _affine_blocks(weights, 31, -0.5, 15)
    fifth = (levels_NGS >> np.uint8(4)) << np.arange(8, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce(fifth, axis=1)
    return np.concatenate([head, high, _nibbles(levels_NGS & np.uint8(15))], axis=1)


def q6_k(weights: Floats) -> Bytes:
    """Rows of 210 bytes a block: 16 groups of 16, each with a scale of 8 bits."""
    x_NGS = weights.reshape(-1, 16, 16)
    scales_NG, levels_NGS = _symmetric_fit(x_NGS.reshape(-1, 16), 32, x_NGS.shape[:2])
    largest_N = np.take_along_axis(scales_NG, np.abs(scales_NG).argmax(1)[:, None], 1)[:, 0]
    is_zero = np.abs(largest_N) < _TINY
    # -128, not 127: int8 has one step more below 0, and ggml uses it.
    inverse_N = np.float32(-128) / np.where(is_zero, np.float32(1), largest_N)
    d_N = np.where(is_zero, np.float32(0), 1 / inverse_N).astype(np.float16)
    steps_NG = np.minimum(np.rint(inverse_N[:, None] * scales_NG), 127).astype(np.int8)
    steps_NG[is_zero] = 0
    step = d_N.astype(np.float32)[:, None, None] * steps_NG[..., None].astype(np.float32)
    # The scales were rounded to 8 bits, so other levels are nearest now.
    again = np.clip(np.rint(x_NGS / np.where(step == 0, np.float32(1), step)), -32, 31) + 32
    chosen = np.where(step == 0, levels_NGS, again).astype(np.uint8)
    chosen[is_zero] = 0
    parts = chosen.reshape(-1, 2, 4, 32)
    low = (parts[:, :, :2] & 15) | (parts[:, :, 2:] & 15) << 4
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce((parts >> 4) << shifts, axis=2)
    n = len(x_NGS)
    return np.concatenate(
        [low.reshape(n, 128), high.reshape(n, 64), steps_NG.view(np.uint8), _halves(d_N)], axis=1
    )


def _affine_blocks(
    weights: Floats, top: int, first: float, steps: int
) -> tuple[Bytes, NDArray[np.uint8]]:
    """The first 16 bytes of every block, and the levels of its weights: w = d s l - dmin m."""
    x_NGS = weights.reshape(-1, 8, 32)
    scales, lows, levels = _affine_fit(x_NGS.reshape(-1, 32), top, first, steps)
    scales_NG, lows_NG = scales.reshape(-1, 8), lows.reshape(-1, 8)
    d_N, s_NG = _six_bits(scales_NG)
    dmin_N, m_NG = _six_bits(lows_NG)
    step = (d_N.astype(np.float32)[:, None] * s_NG)[..., None]
    low = (dmin_N.astype(np.float32)[:, None] * m_NG)[..., None]
    # The scales were rounded to 6 bits, so other levels are nearest now.
    again = np.clip(np.rint((x_NGS + low) / np.where(step == 0, np.float32(1), step)), 0, top)
    chosen = np.where(step == 0, levels.reshape(x_NGS.shape), again).astype(np.uint8)
    packed = np.concatenate(
        [
            # 16 numbers of 6 bits in 12 bytes: above four of them lie
            # the upper bits of the other four.
            s_NG[:, :4] | (s_NG[:, 4:] >> 4) << 6,
            m_NG[:, :4] | (m_NG[:, 4:] >> 4) << 6,
            (s_NG[:, 4:] & 15) | (m_NG[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    return np.concatenate([_halves(d_N), _halves(dmin_N), packed], axis=1), chosen


def _six_bits(values_NG: Floats) -> tuple[NDArray[np.float16], NDArray[np.uint8]]:
    """Non-negative values of a block as multiples 0 to 63 of one half-precision number."""
    largest = values_NG.max(1)
    inverse = np.where(largest > 0, np.float32(63) / np.where(largest > 0, largest, 1), 0)
    steps = np.minimum(np.rint(inverse.astype(np.float32)[:, None] * values_NG), 63)
    return (largest / np.float32(63)).astype(np.float16), steps.astype(np.uint8)


def _affine_fit(
    x: Floats, top: int, first: float, steps: int
) -> tuple[Floats, Floats, NDArray[np.float32]]:
    """For each row, a scale and a minimum (as a positive number) with which levels 0 to ``top``
    approximate it, weighted by magnitude, and the levels. Tries ``steps`` + 1 spacings."""
    w = np.sqrt(np.mean(x * x, axis=1, keepdims=True)) + np.abs(x)
    sum_w, sum_x, wx = w.sum(1), (w * x).sum(1), w * x
    # The format subtracts the minimum, which has no sign: a row above 0 has none.
    low, high = np.minimum(x.min(1), 0), x.max(1)
    is_flat = high == low
    # So that nothing divides by 0; such rows get their values at the end.
    high = np.where(is_flat, low + 1, high)
    scale = (high - low) / np.float32(top)
    levels = np.clip(np.rint((x - low[:, None]) / scale[:, None]), 0, top)
    best = _error(x, w, scale, low, levels)
    for step in range(steps + 1):
        spacing = np.float32(first + 0.1 * step + top) / (high - low)
        tried = np.clip(np.rint(spacing[:, None] * (x - low[:, None])), 0, top)
        wl = w * tried
        sum_l, sum_ll, sum_lx = wl.sum(1), _dot(wl, tried), _dot(wx, tried)
        determinant = sum_w * sum_ll - sum_l * sum_l
        safe = np.where(determinant > 0, determinant, 1)
        new_scale = (sum_w * sum_lx - sum_x * sum_l) / safe
        new_low = (sum_ll * sum_x - sum_l * sum_lx) / safe
        # The format cannot say it: fitted again with a minimum of 0.
        is_above = new_low > 0
        new_scale = np.where(is_above, sum_lx / np.where(sum_ll > 0, sum_ll, 1), new_scale)
        new_low = np.where(is_above, np.float32(0), new_low)
        error = _error(x, w, new_scale, new_low, tried)
        better = (determinant > 0) & (error < best)
        best = np.where(better, error, best)
        scale, low = np.where(better, new_scale, scale), np.where(better, new_low, low)
        np.copyto(levels, tried, where=better[:, None])
    scale[is_flat] = 0
    low = np.where(is_flat, x.min(1), low)
    levels[is_flat] = 0
    return scale, -np.minimum(low, 0), levels


def _symmetric_fit(
    x: Floats, top: int, shape: tuple[int, int]
) -> tuple[Floats, NDArray[np.float32]]:
    """For each row, a scale with which levels -``top`` to ``top`` - 1 approximate it, weighted by
    the squares, and the levels plus ``top``."""
    largest = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1)[:, 0]
    is_zero = np.abs(largest) < _TINY
    safe = np.where(is_zero, np.float32(1), largest)
    xx = x * x
    xxx = xx * x
    scale = best = np.zeros(len(x), np.float32)
    levels = np.zeros_like(x)
    # ggml's order: the plain spacing is taken as it is, any other only if it is better.
    for step in [0, *range(-9, 0), *range(1, 10)]:
        spacing = -np.float32(top + 0.1 * step) / safe
        tried = np.clip(np.rint(spacing[:, None] * x), -top, top - 1)
        sum_lx, sum_ll = _dot(xxx, tried), _dot(xx * tried, tried)
        better = (sum_ll > 0) & ((sum_lx * sum_lx > best * sum_ll) | (step == 0))
        new = sum_lx / np.where(sum_ll > 0, sum_ll, 1)
        scale, best = np.where(better, new, scale), np.where(better, new * sum_lx, best)
        np.copyto(levels, tried, where=better[:, None])
    scale, levels = np.where(is_zero, np.float32(0), scale), levels + top
    levels[is_zero] = 0
    return scale.reshape(shape), levels.reshape(*shape, -1)


def _error(x: Floats, w: Floats, scale: Floats, low: Floats, levels: Floats) -> Floats:
    difference = scale[:, None] * levels
    difference += low[:, None]
    difference -= x
    return _dot(w * difference, difference)


def _dot(a: Floats, b: Floats) -> Floats:
    products: Floats = np.einsum("ns,ns->n", a, b)
    return products


def _nibbles(levels_NGS: NDArray[np.uint8]) -> Bytes:
    """Two groups share bytes, the first in the lower four bits."""
    pairs = levels_NGS.reshape(-1, 4, 2, 32)
    return (pairs[:, :, 0] | pairs[:, :, 1] << np.uint8(4)).reshape(-1, 128)


def _halves(values_N: NDArray[np.float16]) -> Bytes:
    # GGUF is little-endian, whatever this machine is.
    return values_N.astype("<f2").view(np.uint8).reshape(-1, 2)


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
    main = format_.main
    if main in (T.F32, T.F16, T.BF16):
        return main
    # A tied model has no output.weight: its embeddings are the output, too.
    if name == "output.weight" or (model.is_tied and name == "token_embd.weight"):
        is_even = shape[-1] % GGML_QUANT_SIZES[main][0] == 0 and main != T.Q8_0
        return T.Q6_K if is_even else T.Q8_0
    return _of_layer(name, format_, model)


def _of_layer(name: str, format_: Format, model: LayerCounts) -> T:
    main, mix, eighth = format_.main, format_.mix, model.num_layers // 8
    layer_match = _LAYER.match(name)
    layer = int(layer_match[1]) if layer_match else -1
    # With mix M, the first and last eighth of the layers, and every third between.
    has_more_bits = mix == "M" and (
        layer < eighth or layer >= 7 * model.num_layers // 8 or (layer - eighth) % 3 == 2
    )
    # llama.cpp knows Mixtral 8x7B by this, to which Q8_0 in attention
    # adds little beside the experts.
    is_mixtral = model.num_experts == 8
    if "attn_v.weight" in name or "attn_qkv.weight" in name:
        kind = T.Q6_K if has_more_bits else main
        if kind == T.Q4_K and (model.is_70b or (mix == "S" and layer < 4)):
            kind = T.Q5_K
        return T.Q8_0 if is_mixtral else kind
    if "attn_k.weight" in name and is_mixtral:
        return T.Q8_0
    if "attn_output.weight" in name and is_mixtral and main == T.Q4_K:
        return T.Q5_K
    if "ffn_down" in name and has_more_bits:
        return T.Q6_K
    if "ffn_down" in name and mix == "S" and main == T.Q4_K and layer < eighth:
        return T.Q5_K
    return main


def fitting(kind: T, columns: int) -> T:
    """``kind``, or the type that llama.cpp takes where a row of ``columns`` does not fit."""
    for candidate in (kind, _FALLBACKS.get(kind, T.F16), T.F16):
        if columns % GGML_QUANT_SIZES[candidate][0] == 0:
            return candidate
    raise AssertionError("F16 has blocks of one")
