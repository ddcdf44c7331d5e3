"""Open the GGUF file of a LoRA adapter on its base, read by the package gguf, and added by hand.

Legend of shapes: O outputs, I inputs, r the rank. llama.cpp adds alpha / r B A to a weight [O, I].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig

from ...errors import ModelError

_A, _B = ".lora_a", ".lora_b"
_FIELDS = ("adapter.type", "general.architecture", "adapter.lora.alpha")
_KIND = "lora"  # of adapters
_PERMUTED = ("llama", "mistral")  # rows of a head of q and k are pairs in the file


@torch.no_grad()
def add_adapter(model: Any, path: Path) -> None:
    """Add the updates of the adapter in ``path`` to the weights of the transformers ``model``, its
    base. Raises ``ModelError`` if the file has none, or one that has no place there."""
    from gguf import GGUFReader

    file = GGUFReader(path)
    fields = [file.get_field(name) for name in _FIELDS]
    kind, architecture, alpha = (None if one is None else one.contents() for one in fields)
    if kind != _KIND or architecture is None or alpha is None:
        raise ModelError(f"{path}: is not a LoRA adapter")
    factors = {tensor.name: _values(tensor) for tensor in file.tensors}
    layers = _layers(model, str(architecture))
    names = {name.removesuffix(_A).removesuffix(_B) for name in factors}
    if odd := sorted(name for name in names if name not in layers):
        raise ModelError(f"{path}: {odd[0]} is not a linear layer of its base")
    for name in names:
        layer = layers[name]
        a_rI, b_Or = factors[name + _A], factors[name + _B]
        if ".attn_q." in name or ".attn_k." in name:
            b_Or = _in_halves(b_Or, model.config)
        if (len(b_Or), a_rI.shape[1]) != tuple(layer.weight.shape):
            raise ModelError(
                f"{path}: {name} does not fit the {tuple(layer.weight.shape)} of its base"
            )
        update_OI = float(alpha) / len(a_rI) * (b_Or @ a_rI)
        layer.weight += update_OI.to(layer.weight)


def _values(tensor: Any) -> torch.Tensor:
    """In float32, from whatever type."""
    from gguf.quants import dequantize

    values = dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(np.array(values, np.float32))


def _layers(model: Any, architecture: str) -> dict[str, Any]:
    """The linear layers by their weight's name in a file of that architecture."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(one for one in MODEL_ARCH if MODEL_ARCH_NAMES.get(one) == architecture)
    names = get_tensor_name_map(arch, model.config.num_hidden_layers)
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    found = {f"{names.get_name(name)}.weight": layer for name, layer in linear.items()}
    if odd := [name for name, layer in linear.items() if not layer.weight.is_floating_point()]:
        raise ModelError(f"{odd[0]} of its base is quantized, so nothing can be added to it")
    return found


def _in_halves(rows: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    """Rows of queries or keys in the order of transformers, which rotates the first half of a head
    against the second, where llama.cpp rotates neighbors."""
    if config.model_type not in _PERMUTED:
        return rows
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return rows.view(-1, size // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
