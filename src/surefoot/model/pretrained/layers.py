"""How decoder layers are computed: what they keep for the backward pass, compiled, in float8.

Activation checkpointing: what a layer keeps for the backward pass, and what is recomputed there.

Recomputation runs the same kernels on the same values with the same random numbers, so losses and
gradients are bitwise those without it.

Compiled layers: each forward pass becomes a few fused kernels, forward and backward.

The function is compiled, not the module. So names of weights stay the same, and the hooks that
gather a sharded layer's weights run outside of it. So does activation checkpointing, which calls
the compiled function a second time. All layers of a kind share the compiled code, for any number of
rows and tokens.

Products of trained linear layers in float8, through torchao; weights stay as they are.

Inputs, weights and gradients are scaled and rounded to 8 bits for each product (dynamic scaling, so
there is no state to save). A GPU of compute capability 8.9 or newer multiplies them at up to twice
the speed of bfloat16. Elsewhere the same rounding is emulated, slowly: to try how a run learns.

Each token has a scale of its own. torchao's recipe with one scale for a tensor is not offered:
there the examples of a packed row would change each other's rounding.
"""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...errors import ModelError, RecipeError, installation
from ..fused_lora import disable_fused_lora
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


Function = Callable[..., object]
# With and without gradients, with and without a mask, one row or one token, in each kind of layer.
_MAX_VARIANTS = 32


def compile_layers(layers: Sequence[nn.Module], *, backend: str = "inductor") -> None:
    """Compile the forward passes of ``layers`` in place, each at its first use.

    Call it last: after adapters, activation checkpointing and sharding.

    Raises ``RecipeError`` if there is nothing to compile, or no compiler.
    """
    if not layers:
        raise RecipeError("model.compile: this model has no list of layers; set it to false")
    torch._dynamo.config.recompile_limit = max(_MAX_VARIANTS, torch._dynamo.config.recompile_limit)
    options: dict[str, Any] | None = None
    if backend == "inductor":
        _must_have_compiler()
        options = {"fallback_random": True}  # so that dropout is that of plain layers

    @cache
    def compiled(function: Function) -> Function:
        made: Function = torch.compile(function, backend=backend, options=options, dynamic=True)
        return made

    for layer in layers:
        disable_fused_lora(layer)
        if getattr(layer, "gradient_checkpointing", False):
            _compile_inside(layer, compiled)
        else:
            layer.forward = compiled(layer.forward)


def _compile_inside(layer: nn.Module, compiled: Callable[[Function], Function]) -> None:
    """Compile inside activation checkpointing, whose graph break would leave nothing compiled."""
    recomputed: Function = layer._gradient_checkpointing_func  # type: ignore[assignment]

    def run(function: partial[object], *arguments: object) -> object:
        inner = partial(compiled(function.func), *function.args, **function.keywords)
        return recomputed(inner, *arguments)

    layer._gradient_checkpointing_func = run  # type: ignore[assignment]


def _must_have_compiler() -> None:
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        raise RecipeError(
            f"model.compile: there is no C++ compiler {name!r} on this machine; install one "
            "(apt install g++), set the variable CXX to yours, or set model.compile to false"
        )


logger = logging.getLogger(__name__)
MULTIPLE = 16  # of both sizes of a matrix, for the kernels
OLDEST = (8, 9)  # compute capability
_ROUTERS = {"gate", "router"}  # of experts: small, and what they decide is not continuous

Scaling = Literal["rowwise"]  # names of torchao's recipes


def use_float8(layers: Sequence[nn.Module], scaling: Scaling, *, emulate: bool) -> int:
    """Let the trained linear maps of decoder layers compute in float8; returns how many do.

    Raises ``ModelError`` if torchao is missing, or no linear map is suitable.
    """
    if find_spec("torchao") is None:
        raise ModelError(
            f"model.float8 needs torchao, which is not installed: `{installation('torchao')}`"
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # rows have any number of tokens, along which gradients of weights are sums
    config = Float8LinearConfig.from_recipe_name(scaling)
    config = replace(config, emulate=emulate, pad_inner_dim=True)
    named = (pair for layer in layers for pair in layer.named_modules())
    before = sum(_is_suitable(module, name) for name, module in named)
    if not before:
        raise ModelError(
            f"model.float8: no trained linear layer has sizes that are multiples of {MULTIPLE}; "
            "leave it unset"
        )
    for layer in layers:
        convert_to_float8_training(layer, config=config, module_filter_fn=_is_suitable)
    return before


def emulates(device: torch.device) -> bool:
    """Whether a CPU can only emulate float8. Raises ``ModelError`` for a GPU without it."""
    if device.type != "cuda":
        logger.warning("model.float8: a CPU emulates it, slower than without; for trials only")
        return True
    found = torch.cuda.get_device_capability(device)
    if found < OLDEST:
        name = torch.cuda.get_device_name(device)
        raise ModelError(
            f"model.float8: {name} has compute capability {found[0]}.{found[1]}, expected at least "
            f"{OLDEST[0]}.{OLDEST[1]}; leave model.float8 unset"
        )
    return False


def _is_suitable(module: nn.Module, name: str) -> bool:
    if type(module) is not nn.Linear or name.rpartition(".")[2] in _ROUTERS:
        return False
    sizes = module.in_features, module.out_features
    return module.weight.requires_grad and not any(size % MULTIPLE for size in sizes)
