"""What each trainable parameter is in its model, for optimizers that treat matrices otherwise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..model.adaptable import HEAD, ROUTER, is_added, matrices, plain_name
from ..model.attention.fused_projections import fused_projection, head_size
from ..optim.parameter_kind import OTHER, ParameterKind, ParameterKinds

_IN_LAYER = re.compile(r"\.\d+\.")
_HALVES = ("gate_up_proj", "gate_and_up_proj")
_HEADS = ("q_proj", "k_proj", "query", "key", "q_lin", "k_lin")


def kinds_of(inner: PreTrainedModel, named: Mapping[str, nn.Parameter]) -> ParameterKinds:
    """The layout of each of the parameters ``named`` of ``inner``, which PEFT may have wrapped."""
    known = {m.name: m for m in matrices(inner) if m.left_out not in (HEAD, ROUTER)}
    modules = {plain_name(name): module for name, module in inner.named_modules()}
    found: dict[int, ParameterKind] = {}
    for name, parameter in inner.named_parameters():
        plain = plain_name(name)
        if plain in known and not is_added(name) and _IN_LAYER.search(plain):
            found[id(parameter)] = _layout(plain, parameter, inner, modules)
    return {name: found.get(id(parameter), OTHER) for name, parameter in named.items()}


def _layout(
    name: str, parameter: nn.Parameter, inner: PreTrainedModel, modules: Mapping[str, nn.Module]
) -> ParameterKind:
    path = name.rpartition(".")[0]
    module, own = modules[path], name.removesuffix(".weight").rpartition(".")[2]
    is_transposed = isinstance(module, Conv1D) or getattr(module, "is_transposed", False) is True
    shape = [*parameter.shape[-2:]][:: -1 if is_transposed else 1]
    usual = ParameterKind(is_matrix=True, is_transposed=is_transposed)
    if own in _HALVES and shape[0] % 2 == 0:
        half, is_whole = shape[0] // 2, getattr(module, "is_concatenated", True)
        return replace(usual, parts=(half, half), num_groups=1 if is_whole else half)
    config = inner.config.get_text_config()
    attention = modules[path.rpartition(".")[0]]
    if fused := fused_projection(own, shape, attention, config):
        groups = fused.num_groups
        return replace(usual, parts=fused.parts, num_groups=groups, is_unknown=not fused.parts)
    size = head_size(config)
    is_of_heads = own in _HEADS and size and shape[0] % size == 0
    return replace(usual, head_size=size) if is_of_heads else usual
