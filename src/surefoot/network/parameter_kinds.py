"""What each trainable parameter is in its model, for optimizers that treat matrices otherwise."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..model.adaptable import HEAD, ROUTER, is_added, matrices, plain_name
from ..optim.parameter_kind import OTHER, ParameterKind, ParameterKinds

_IN_LAYER = re.compile(r"\.\d+\.")
_HALVES = ("gate_up_proj", "gate_and_up_proj")
_QKV = ("qkv_proj", "Wqkv", "c_attn", "attn_qkv")  # queries, then keys, then values
_HEADS = ("q_proj", "k_proj", "query", "key", "q_lin", "k_lin")


def kinds_of(inner: PreTrainedModel, named: Mapping[str, nn.Parameter]) -> ParameterKinds:
    """The layout of each of the parameters ``named`` of ``inner``, which PEFT may have wrapped."""
    known = {m.name: m for m in matrices(inner) if m.left_out not in (HEAD, ROUTER)}
    modules = dict(inner.named_modules())
    found: dict[int, ParameterKind] = {}
    for name, parameter in inner.named_parameters():
        plain = plain_name(name)
        if plain in known and not is_added(name) and _IN_LAYER.search(plain):
            module = modules[name.rpartition(".")[0]]
            found[id(parameter)] = _layout(plain, parameter, module, inner)
    return {name: found.get(id(parameter), OTHER) for name, parameter in named.items()}


def _layout(
    name: str, parameter: nn.Parameter, module: nn.Module, inner: PreTrainedModel
) -> ParameterKind:
    own = name.removesuffix(".weight").rpartition(".")[2]
    is_transposed = isinstance(module, Conv1D) or getattr(module, "is_transposed", False) is True
    outputs = parameter.shape[-1 if is_transposed else -2]
    config = inner.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 0) or 0
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    is_head = own in _HEADS and size and outputs % size == 0
    return ParameterKind(
        is_matrix=True,
        parts=_parts(own, outputs, [heads * size, kv_heads * size, kv_heads * size]),
        head_size=size if is_head else 0,
        is_transposed=is_transposed,
        is_interleaved=getattr(module, "is_concatenated", True) is False,
    )


def _parts(own: str, outputs: int, attention: Sequence[int]) -> tuple[int, ...]:
    """The outputs of the matrices that are fused in one; empty for one that is not."""
    if own in _HALVES and outputs % 2 == 0:
        return (outputs // 2, outputs // 2)
    if own in _QKV and sum(attention) == outputs:
        return tuple(attention)
    return ()
