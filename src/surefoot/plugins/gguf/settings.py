"""The settings of a model in a GGUF file: ``llama.block_count`` and so on, and its rotations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf import GGUFWriter, RopeScalingType
from transformers import PretrainedConfig

from ...errors import ModelError
from .architectures import GGUFArchitecture, head_dim
from .k_quants import Floats

_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def add_settings(writer: GGUFWriter, config: PretrainedConfig, row: GGUFArchitecture) -> None:
    """What llama.cpp needs to build the model."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    width = head_dim(config)
    writer.add_key_length(width)
    writer.add_value_length(width)
    rotated = int(width * rope_of(config).get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(rotated)
    if row.name == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    _add_windows(writer, config, row)
    _add_rope(writer, config)


def _add_windows(writer: GGUFWriter, config: PretrainedConfig, row: GGUFArchitecture) -> None:
    if row.window_period:
        writer.add_sliding_window(config.sliding_window)
        if cap := getattr(config, "attn_logit_softcapping", None):
            writer.add_attn_logit_softcapping(cap)
        if cap := getattr(config, "final_logit_softcapping", None):
            writer.add_final_logit_softcapping(cap)
    elif row.name == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)  # 0: none, as in Phi-4


def _add_rope(writer: GGUFWriter, config: PretrainedConfig) -> None:
    rope, both = rope_of(config), config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in both:
        writer.add_rope_freq_base_swa(both["sliding_attention"]["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(_original(config, rope))
        _add_yarn(writer, rope)
    elif kind == "longrope":
        writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
        writer.add_rope_scaling_attn_factors(_long_attention(config, rope))
    if config.model_type == "phi3":
        writer.add_rope_scaling_orig_ctx_len(_original(config, rope))


def _add_yarn(writer: GGUFWriter, rope: Mapping[str, Any]) -> None:
    """The settings that differ from llama.cpp's own."""
    if rope.get("beta_fast") is not None:
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    if rope.get("beta_slow") is not None:
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def rope_tensors(config: PretrainedConfig) -> dict[str, Floats]:
    """The divisors of rotary frequencies that are tensors of the file."""
    rope = rope_of(config)
    if rope.get("rope_type") == "llama3":
        return {"rope_freqs.weight": _llama3_factors(config, rope)}
    if rope.get("rope_type") == "longrope":
        pairs = {_LONG: rope["long_factor"], _SHORT: rope["short_factor"]}
        return {name: np.array(values, np.float32) for name, values in pairs.items()}
    return {}


def rope_of(config: PretrainedConfig) -> Mapping[str, Any]:
    """The rotary embeddings of the layers that attend to all tokens."""
    rope: Mapping[str, Any] = config.rope_parameters
    whole: Mapping[str, Any] = rope.get("full_attention", rope)
    return whole


def check_rope(config: PretrainedConfig, row: GGUFArchitecture, where: str) -> None:
    """Raise ``ModelError`` for rotary embeddings that the file cannot say."""
    rope = rope_of(config)
    kind = rope.get("rope_type", "default")
    known = {"default", "linear", "yarn"} | ({"llama3"} if row.name == "llama" else set())
    known |= {"longrope"} if row.long_rope else set()
    if kind not in known:
        raise ModelError(
            f"{where}: llama.cpp's {row.name} has no rope_type {kind}, only "
            f"{', '.join(sorted(known))}"
        )
    inner = config.rope_parameters.get("sliding_attention", {})
    if inner.get("rope_type", "default") != "default":
        raise ModelError(f"{where}: GGUF cannot rescale the positions of layers with a window")
    if kind == "yarn" and (rope.get("mscale") or rope.get("truncate", True) is False):
        raise ModelError(f"{where}: GGUF has no mscale or truncate of rope_type yarn")
    own = rope.get("attention_factor")
    if kind == "yarn" and own and not math.isclose(own, _yarn_attention(rope), rel_tol=1e-5):
        raise ModelError(
            f"{where}: llama.cpp scales the attention of rope_type yarn by "
            f"{_yarn_attention(rope):.4g}, not by attention_factor {own}"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0 and not row.is_partial:
        raise ModelError(f"{where}: llama.cpp's {row.name} rotates whole heads only")


def _yarn_attention(rope: Mapping[str, Any]) -> float:
    """By which YaRN scales queries and keys."""
    return 0.1 * math.log(rope["factor"]) + 1


def _original(config: PretrainedConfig, rope: Mapping[str, Any]) -> int:
    """The positions before any extension."""
    own = rope.get("original_max_position_embeddings")
    own = own or getattr(config, "original_max_position_embeddings", None)
    return int(own or config.max_position_embeddings)


def _long_attention(config: PretrainedConfig, rope: Mapping[str, Any]) -> float:
    """By which LongRoPE scales queries and keys."""
    if (own := rope.get("attention_factor")) is not None:
        return float(own)
    original = _original(config, rope)
    factor = config.max_position_embeddings / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _llama3_factors(config: PretrainedConfig, rope: Mapping[str, Any]) -> Floats:
    """What llama.cpp divides each frequency by: long waves by ``factor``, short ones by 1."""
    width = head_dim(config)
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, width, 2) / width)
    turns = _original(config, rope) * frequencies / (2 * math.pi)
    low, high, factor = (rope[k] for k in ("low_freq_factor", "high_freq_factor", "factor"))
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    found: Floats = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    return found
