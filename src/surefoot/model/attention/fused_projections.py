"""Queries, keys and values that are one matrix: which of its outputs are which."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig

_FUSED = re.compile(r"qkv|query_key_value|c_attn|w_pack|in_proj_ba", re.IGNORECASE)
# By the package of transformers that defines the attention: all queries come first, or those of
# each head, or those of each head of keys and values.
_IN_ORDER = {"dbrx", "decision_transformer", "gpt2", "imagegpt", "mpt", "openai", "phi3"}
_IN_ORDER |= {"modernbert", "phi4_multimodal"}
_BY_HEAD = {"bloom", "gpt_neox", "gpt_neox_japanese", "minimax", "persimmon"}
_BY_KEY_HEAD = {"falcon", "gpt_bigcode"}
_IN_FOUR = {"codegen"}


@dataclass(frozen=True)
class FusedProjection:
    """The outputs of each of the fused matrices, in order, and in how many groups of outputs each
    has its share. Without outputs, they are not known."""

    parts: tuple[int, ...] = ()
    num_groups: int = 1


def fused_projection(
    name: str, shape: Sequence[int], attention: nn.Module, config: PretrainedConfig
) -> FusedProjection | None:
    """What is fused in the linear layer ``name`` of an attention module, whose weight has this
    ``shape``, outputs first; None if it is one matrix by its name."""
    if not _FUSED.search(name):
        return None
    found = _linear(name, attention) or _of_heads(name, shape, attention, config)
    is_right = found is not None and sum(found.parts) == shape[0]
    return found if is_right else FusedProjection()


def _of_heads(
    name: str, shape: Sequence[int], attention: nn.Module, config: PretrainedConfig
) -> FusedProjection | None:
    if name == "qkv" and shape[0] == 3 * shape[1]:  # of a vision tower
        return FusedProjection((shape[1],) * 3)
    size = getattr(attention, "head_dim", None) or head_size(config)
    heads, package = num_heads(config), type(attention).__module__.split(".")[-2:][0]
    queries, others = heads * size, shape[0] - heads * size
    if name == "c_attn" and others == queries:  # cross attention: keys and values
        return FusedProjection((queries, queries)) if package in _IN_ORDER else None
    groups = {
        **dict.fromkeys(_IN_ORDER, 1),
        **dict.fromkeys(_BY_HEAD, heads),
        **dict.fromkeys(_BY_KEY_HEAD, others // 2 // max(1, size)),
        **dict.fromkeys(_IN_FOUR, 4),
    }
    if package not in groups or not size or others <= 0 or others % (2 * size):
        return None
    return FusedProjection((queries, others // 2, others // 2), groups[package])


def _linear(name: str, attention: nn.Module) -> FusedProjection | None:
    """Of gated linear attention, as Qwen3-Next and Qwen3.5 have it."""
    if not hasattr(attention, "key_dim") or not hasattr(attention, "num_v_heads"):
        return None
    sizes = (attention.key_dim, attention.value_dim, attention.num_v_heads, attention.num_k_heads)
    keys, values, heads, groups = map(int, sizes)  # type: ignore[arg-type]
    known = {
        "in_proj_qkv": FusedProjection((keys, keys, values)),
        "in_proj_qkvz": FusedProjection((keys, keys, values, values), groups),
        "in_proj_ba": FusedProjection((heads, heads), groups),
    }
    return known.get(name)


def num_heads(config: PretrainedConfig) -> int:
    """The heads of attention; 0 if the layers differ, or have none."""
    found = getattr(config, "num_attention_heads", 0)
    return found if isinstance(found, int) else 0


def head_size(config: PretrainedConfig) -> int:
    """The outputs of one head of attention; 0 if they are not known."""
    found, heads = getattr(config, "head_dim", None), num_heads(config)
    return found or (config.hidden_size // heads if heads else 0)
