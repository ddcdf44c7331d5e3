"""Activation checkpointing: what a layer keeps for the backward pass, and what is recomputed there.

Recomputation runs the same kernels on the same values with the same random numbers, so losses and
gradients are bitwise those without it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..section import Recomputation

_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_mm.default,
}
_ATTENTION = {  # the position of dropout_p among the arguments
    _aten._scaled_dot_product_flash_attention.default: 3,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    _aten._scaled_dot_product_efficient_attention.default: 5,
    _aten._scaled_dot_product_cudnn_attention.default: 5,
}


def recompute_activations(
    model: PreTrainedModel, policy: Recomputation = "full", *, keep_random: bool = True
) -> None:
    """Keep of each layer what ``policy`` says, and recompute the rest in the backward pass, with
    the same random numbers unless ``keep_random`` is false, as on fake tensors.

    Call it when the trainable parameters are known: below the lowest trainable layer or embedding,
    nothing is saved anyway.
    """
    if policy == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": keep_random}
    if policy == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _kept)
    with warnings.catch_warnings():  # 5.23 renamed it; this name works in all of transformers 5
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(options)
    model.disable_input_require_grads()  # what recomputes without reentering needs no such hook
    learns = any(p.requires_grad for p in model.get_input_embeddings().parameters())
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            learns = learns or any(p.requires_grad for p in layer.parameters())
            layer.gradient_checkpointing = learns
            if policy == "offload":
                layer._gradient_checkpointing_func = partial(
                    _offloaded, _main_memory if keep_random else _elsewhere, options
                )


def _kept(
    _context: SelectiveCheckpointContext, op: Any, *arguments: Any, **options: Any
) -> CheckpointPolicy:
    """Keep products and attention. Attention with dropout is recomputed: what is not run again
    draws no random numbers, and those after it would be others."""
    place = _ATTENTION.get(op)
    if place is not None:
        dropout = arguments[place] if len(arguments) > place else options.get("dropout_p", 0.0)
        return CheckpointPolicy.PREFER_RECOMPUTE if dropout else CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.MUST_SAVE if op in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def _offloaded(
    hooks: Callable[[], torch.autograd.graph.saved_tensors_hooks],
    options: dict[str, Any],
    function: Callable[..., object],
    *arguments: object,
    **named: Any,
) -> object:
    """Run a layer, and keep its input where ``hooks`` put it."""
    with hooks():
        return checkpoint(function, *arguments, **options, **named)


def _main_memory() -> torch.autograd.graph.saved_tensors_hooks:
    is_pinned = torch.cuda.is_available()
    return torch.autograd.graph.save_on_cpu(pin_memory=is_pinned)


def _elsewhere() -> torch.autograd.graph.saved_tensors_hooks:
    """For a dry run: shapes alone are kept, as main memory is not counted."""
    return torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (tensor.shape, tensor.dtype, tensor.device),
        lambda kept: torch.empty(kept[0], dtype=kept[1], device=kept[2]),
    )
