"""Weights as the bytes of a GGUF type."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize

from ...errors import CheckpointError
from .k_quants import Bytes, Floats, q4_k, q5_k, q6_k

T = GGMLQuantizationType
_K_QUANTS: Mapping[T, Callable[[Floats], Bytes]] = {T.Q4_K: q4_k, T.Q5_K: q5_k, T.Q6_K: q6_k}
_CHUNK = 1 << 16  # weights whose intermediate values stay in the cache


def num_bytes(shape: tuple[int, ...], kind: T) -> int:
    """The bytes of a tensor of ``shape``."""
    block, size = GGML_QUANT_SIZES[kind]
    return int(np.prod(shape, dtype=np.int64)) // block * size


def pack(values: Floats, kind: T, name: str) -> bytes:
    """``values``, whole rows, as ``kind``. Raises ``CheckpointError`` for what it cannot hold."""
    if not np.isfinite(values).all():
        raise CheckpointError(f"{name}: it contains NaN or infinite values; nothing was written")
    if kind in _K_QUANTS:
        flat = values.reshape(-1)
        parts = [flat[i : i + _CHUNK] for i in range(0, len(flat), _CHUNK)]
        return b"".join(_K_QUANTS[kind](part).tobytes() for part in parts)
    with np.errstate(over="ignore"):
        packed = quantize(values, kind)
    if kind == T.F16 and not np.isfinite(packed).all():
        raise CheckpointError(f"{name}: its values exceed float16; use --quantize bf16 or f32")
    return packed.tobytes()
