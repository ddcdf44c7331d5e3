"""The architectures that can be written as GGUF: one row each.

A row says what llama.cpp's graph of that name takes for granted. A model that differs from it is
refused, since it would load and give other answers.

The settings of a model in a GGUF file: ``llama.block_count`` and so on, and its rotations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGUFWriter, RopeScalingType
from transformers import PretrainedConfig

from ...errors import ModelError
from .formats import Floats

_ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class GGUFArchitecture:
    """One row: how a ``model_type`` of transformers is written, and what llama.cpp assumes."""

    name: str
    """``general.architecture`` of the file."""
    activation: str = "silu"
    biased: tuple[str, ...] = ()
    """The projections that may have a bias."""
    is_permuted: bool = False
    """Rotary pairs are adjacent in the file: rows of q_proj and k_proj change places."""
    norm_shift: float = 0.0
    """Added to the weights of norms."""
    window_period: int = 0
    """Of so many layers the last attends to all tokens, the others to the window; 0: all do."""
    long_rope: bool = False
    """Whether it reads long and short factors of rotary embeddings."""
    is_partial: bool = False
    """Whether only a part of each head may be rotated."""


ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture("llama", biased=_ALL, is_permuted=True),
    "mistral": GGUFArchitecture("llama", biased=_ALL, is_permuted=True),
    "qwen2": GGUFArchitecture("qwen2", biased=_ALL[:3]),
    "qwen3": GGUFArchitecture("qwen3"),
    "qwen3_moe": GGUFArchitecture("qwen3moe"),
    # Gemma multiplies by 1 + weight in its norms, llama.cpp by what is in the file.
    "gemma2": GGUFArchitecture("gemma2", "gelu_pytorch_tanh", norm_shift=1.0, window_period=2),
    "gemma3_text": GGUFArchitecture("gemma3", "gelu_pytorch_tanh", norm_shift=1.0, window_period=6),
    "phi3": GGUFArchitecture("phi3", long_rope=True, is_partial=True),
}
_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the 27B, which scale queries another way


def architecture_of(config: PretrainedConfig, where: str) -> GGUFArchitecture:
    """The row of a model. Raises ``ModelError``: there is none, or the model differs from it."""
    row = ARCHITECTURES.get(config.model_type)
    if row is None:
        raise ModelError(
            f"{where}: model_type {config.model_type} cannot be written as GGUF; those that can: "
            f"{', '.join(ARCHITECTURES)}"
        )
    if differences := _differences(config, row):
        raise ModelError(
            f"{where}: cannot be written as GGUF, since llama.cpp's {row.name} differs: "
            f"{'; '.join(differences)}"
        )
    return row


def head_dim(config: PretrainedConfig) -> int:
    """The width of an attention head."""
    configured = getattr(config, "head_dim", None)
    return int(configured or config.hidden_size // config.num_attention_heads)


def _differences(config: PretrainedConfig, row: GGUFArchitecture) -> list[str]:
    """What the model has that llama.cpp's graph has not."""
    act = getattr(config, "hidden_activation", None) or getattr(
        config, "hidden_act", row.activation
    )
    differences = []
    if act != row.activation:
        differences.append(f"activation {row.activation}, not {act}")
    if row.name == "qwen3moe" and not config.norm_topk_prob:
        differences.append(
            "the weights of the chosen experts are normalized (norm_topk_prob: true)"
        )
    if getattr(config, "use_bidirectional_attention", False):
        differences.append("attention is causal (use_bidirectional_attention: false)")
    if row.name == "gemma3" and getattr(config, "attn_logit_softcapping", None):
        differences.append("attn_logit_softcapping is not applied")
    if row.name in _LARGEST:
        is_largest = config.num_hidden_layers == _LARGEST[row.name]
        whole = config.hidden_size // config.num_attention_heads
        expected_scalar = whole if is_largest else head_dim(config)
        # The file has no field for it.
        if config.query_pre_attn_scalar != expected_scalar:  # which llama.cpp takes for granted
            differences.append(
                f"query_pre_attn_scalar is {expected_scalar}, not {config.query_pre_attn_scalar}"
            )
    kinds, period = getattr(config, "layer_types", None), row.window_period
    if period and kinds is not None:
        places = range(1, len(kinds) + 1)
        usual = ["sliding_attention" if i % period else "full_attention" for i in places]
        if list(kinds) != usual:
            differences.append(
                f"every {period}th layer attends to all tokens, the others to a window "
                "(layer_types)"
            )
    return differences


def window_note(config: PretrainedConfig, row: GGUFArchitecture) -> str:
    """What a user must know of a window that llama.cpp ignores; empty if there is none."""
    window = getattr(config, "sliding_window", None)
    if row.window_period or row.name == "phi3" or not window:
        return ""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    # A window as long as the context hides nothing.
    if "sliding_attention" not in kinds or window >= config.max_position_embeddings:
        return ""
    return f"llama.cpp's {row.name} has no sliding window: beyond {window:,} tokens answers differ"


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
    # Not always hidden_size / heads, which llama.cpp takes without it: Qwen3 and Gemma differ.
    writer.add_key_length(width)
    writer.add_value_length(width)
    rotated = int(width * rope_of(config).get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(rotated)
    if row.name == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if row.window_period:
        writer.add_sliding_window(config.sliding_window)
        if cap := getattr(config, "attn_logit_softcapping", None):
            writer.add_attn_logit_softcapping(cap)
        if cap := getattr(config, "final_logit_softcapping", None):
            writer.add_final_logit_softcapping(cap)
    elif row.name == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)  # 0: none, as in Phi-4
    _add_rope(writer, config)


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
        # what differs from llama.cpp's own
        if rope.get("beta_fast") is not None:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        if rope.get("beta_slow") is not None:
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    elif kind == "longrope":
        writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
        writer.add_rope_scaling_attn_factors(_long_attention(config, rope))
    if config.model_type == "phi3":
        writer.add_rope_scaling_orig_ctx_len(_original(config, rope))


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
    rope_types = {"default", "linear", "yarn"} | ({"llama3"} if row.name == "llama" else set())
    rope_types |= {"longrope"} if row.long_rope else set()
    if kind not in rope_types:
        raise ModelError(
            f"{where}: llama.cpp's {row.name} has no rope_type {kind}, only "
            f"{', '.join(sorted(rope_types))}"
        )
    # The file has one kind of scaling, that of the layers that attend to all tokens.
    inner = config.rope_parameters.get("sliding_attention", {})
    if inner.get("rope_type", "default") != "default":
        raise ModelError(f"{where}: GGUF cannot rescale the positions of layers with a window")
    if kind == "yarn" and (rope.get("mscale") or rope.get("truncate", True) is False):
        raise ModelError(f"{where}: GGUF has no mscale or truncate of rope_type yarn")
    attention_factor = rope.get("attention_factor")
    if kind == "yarn" and attention_factor:
        # llama.cpp computes this scale from `factor` alone
        computed_factor = _yarn_attention(rope)
        if not math.isclose(attention_factor, computed_factor, rel_tol=1e-5):
            raise ModelError(
                f"{where}: llama.cpp scales the attention of rope_type yarn by "
                f"{computed_factor:.4g}, not by attention_factor {attention_factor}"
            )
    if rope.get("partial_rotary_factor", 1.0) != 1.0 and not row.is_partial:
        raise ModelError(f"{where}: llama.cpp's {row.name} rotates whole heads only")


def _yarn_attention(rope: Mapping[str, Any]) -> float:
    """By which YaRN scales queries and keys."""
    return 0.1 * math.log(rope["factor"]) + 1


def _original(config: PretrainedConfig, rope: Mapping[str, Any]) -> int:
    """The positions before any extension."""
    original = rope.get("original_max_position_embeddings")
    original = original or getattr(config, "original_max_position_embeddings", None)
    return int(original or config.max_position_embeddings)


def _long_attention(config: PretrainedConfig, rope: Mapping[str, Any]) -> float:
    """By which LongRoPE scales queries and keys."""
    if (attention_factor := rope.get("attention_factor")) is not None:
        return float(attention_factor)
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
    divisors: Floats = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    return divisors
