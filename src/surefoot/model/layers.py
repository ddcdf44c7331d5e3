"""How decoder layers compute, as a recipe sets it: what they keep for the backward pass, compiled,
in float8, and with noise on the embeddings. ``network.open`` calls each once, as it builds a
network; what adapters compute is in ``lora_layers``.

Activation checkpointing runs the same kernels on the same values with the same random numbers, so
losses and gradients are bitwise those without it.

Compiled layers: the function is compiled, not the module. So names of weights stay the same, and
the hooks that gather a sharded layer's weights run outside of it. So does activation checkpointing,
which calls the compiled function a second time. All layers of a kind share the compiled code, for
any number of rows and tokens.

Float8, through torchao: inputs, weights and gradients are scaled and rounded to 8 bits for each
product (dynamic scaling, so there is no state to save); weights stay as they are. A GPU of compute
capability 8.9 or newer multiplies them at up to twice the speed of bfloat16. Elsewhere the same
rounding is emulated, slowly: to try how a run learns. Each token has a scale of its own. torchao's
recipe with one scale for a tensor is not offered: there the examples of a packed row would change
each other's rounding.

NEFTune (arXiv:2310.05914): uniform noise on the embeddings of tokens while a model is trained. The
noise of a token is at most ``alpha / sqrt(L d)``, with L tokens in its example and d hidden
dimensions, whatever is packed or padded beside the example.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import ModelError, RecipeError, installation
from ..log import fell_back
from .lora_layers import disable_fused_lora
from .rms_norm import restore_norms
from .section import Recomputation

Function = Callable[..., object]


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
    if policy == "offload" and keep_random and not torch.cuda.is_available():
        what, why = "model.gradient_checkpointing: offload does what full does", "there is no GPU"
        fell_back(what, why, "saves no more memory", logging.INFO)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": keep_random}
    if policy == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _save_products)
    with warnings.catch_warnings():  # 5.23 renamed it; this name works in all of transformers 5
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(options)
    model.disable_input_require_grads()  # what recomputes without reentering needs no such hook
    is_trained = any(p.requires_grad for p in model.get_input_embeddings().parameters())
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            is_trained = is_trained or any(p.requires_grad for p in layer.parameters())
            layer.gradient_checkpointing = is_trained
            if policy == "offload":
                saving = _in_main_memory if keep_random else _as_shapes
                layer._gradient_checkpointing_func = partial(_offloaded, saving, options)


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


def _save_products(
    _context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Save products and attention. Attention with dropout is recomputed: what is not run again
    draws no random numbers, and those after it would be others."""
    position = _ATTENTION.get(op)
    if position is None:
        return CheckpointPolicy.MUST_SAVE if op in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
    dropout = args[position] if len(args) > position else kwargs.get("dropout_p", 0.0)
    return CheckpointPolicy.PREFER_RECOMPUTE if dropout else CheckpointPolicy.MUST_SAVE


def _offloaded(
    saving: Callable[[], saved_tensors_hooks],
    options: dict[str, Any],
    function: Function,
    *args: object,
    **kwargs: Any,
) -> object:
    """Run a layer under activation checkpointing, whose one saved tensor, the layer's input, is
    saved as ``saving`` says."""
    with saving():
        return checkpoint(function, *args, **options, **kwargs)


def _in_main_memory() -> saved_tensors_hooks:
    """As torch's ``save_on_cpu``, which waits for the GPU after each layer. Both copies are queued
    behind what makes the values, so that nobody has to."""
    if not torch.cuda.is_available():
        return save_on_cpu()

    def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return tensor.device, host.copy_(tensor, non_blocking=True)

    def unpack(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        device, host = packed
        return host.to(device, non_blocking=True)

    return saved_tensors_hooks(pack, unpack)


def _as_shapes() -> saved_tensors_hooks:
    """For a dry run: shapes alone are saved, as main memory is not counted."""
    return saved_tensors_hooks(
        lambda tensor: (tensor.shape, tensor.dtype, tensor.device),
        lambda packed: torch.empty(packed[0], dtype=packed[1], device=packed[2]),
    )


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

    @cache  # a recomputed layer asks for its own function in each pass
    def compiled(function: Function) -> Function:
        compiled: Function = torch.compile(function, backend=backend, options=options, dynamic=True)
        return compiled

    for layer in layers:
        disable_fused_lora(layer)
        restore_norms(layer)
        if getattr(layer, "gradient_checkpointing", False):
            _compile_inside(layer, compiled)
        else:
            layer.forward = compiled(layer.forward)


def _compile_inside(layer: nn.Module, compiled: Callable[[Function], Function]) -> None:
    """Compile inside activation checkpointing, whose graph break would leave nothing compiled."""
    recomputed: Function = layer._gradient_checkpointing_func  # type: ignore[assignment]

    def run(function: partial[object], *args: object) -> object:
        inner = partial(compiled(function.func), *function.args, **function.keywords)
        return recomputed(inner, *args)

    layer._gradient_checkpointing_func = run  # type: ignore[assignment]


def _must_have_compiler() -> None:
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        raise RecipeError(
            f"model.compile: there is no C++ compiler {name!r} on this machine; install one "
            "(apt install g++), set the variable CXX to yours, or set model.compile to false"
        )


Scaling = Literal["rowwise"]  # names of torchao's recipes
_SIZE_MULTIPLE = 16  # of both sizes of a matrix, for the kernels
_MIN_CAPABILITY = (8, 9)
_ROUTERS = {"gate", "router"}  # of experts: small, and what they decide is not continuous


def use_float8(layers: Sequence[nn.Module], scaling: Scaling, *, emulate: bool) -> int:
    """Let the trained linear maps of decoder layers compute in float8; returns how many do.

    Raises ``ModelError`` if torchao is missing, or no linear map is suitable.
    """
    if find_spec("torchao") is None:
        raise ModelError(
            f"model.float8 needs torchao, which is not installed: {installation('torchao')}"
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # rows have any number of tokens, along which gradients of weights are sums
    config = Float8LinearConfig.from_recipe_name(scaling)
    config = replace(config, emulate=emulate, pad_inner_dim=True)
    named_modules = (pair for layer in layers for pair in layer.named_modules())
    num_suitable = sum(_is_suitable(module, name) for name, module in named_modules)
    if not num_suitable:
        raise ModelError(
            "model.float8: no trained linear layer has sizes that are multiples of "
            f"{_SIZE_MULTIPLE}; leave it unset"
        )
    for layer in layers:
        convert_to_float8_training(layer, config=config, module_filter_fn=_is_suitable)
    return num_suitable


def emulates(device: torch.device) -> bool:
    """Whether a CPU can only emulate float8. Raises ``ModelError`` for a GPU without it."""
    if device.type != "cuda":
        cost = "is slower than without; for trials only"
        fell_back("model.float8 is emulated", "a CPU has no products in 8 bits", cost)
        return True
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ModelError(
            f"model.float8: {name} has compute capability {capability[0]}.{capability[1]}, "
            f"expected at least {_MIN_CAPABILITY[0]}.{_MIN_CAPABILITY[1]}; leave model.float8 unset"
        )
    return False


def _is_suitable(module: nn.Module, name: str) -> bool:
    if type(module) is not nn.Linear or name.rpartition(".")[2] in _ROUTERS:
        return False
    sizes = module.in_features, module.out_features
    return module.weight.requires_grad and not any(size % _SIZE_MULTIPLE for size in sizes)


def add_embedding_noise(module: nn.Module, inner: PreTrainedModel, alpha: float) -> None:
    """Add noise to the embeddings of ``inner`` in each forward pass of ``module``, its adapter
    included, in training mode. Torch's generator of the device draws it."""
    noise = _EmbeddingNoise(alpha)
    module.register_forward_pre_hook(noise.begin, with_kwargs=True)
    module.register_forward_hook(noise.end)
    inner.get_input_embeddings().register_forward_hook(noise.add)


@dataclass
class _EmbeddingNoise:
    """Hooks around a forward pass: the model gets the positions, its embeddings get the noise."""

    alpha: float
    inputs: Mapping[str, Any] | None = None  # of a forward pass whose embeddings have no noise yet

    def begin(self, module: nn.Module, _: tuple[object, ...], inputs: Mapping[str, Any]) -> None:
        self.inputs = inputs if module.training else None

    def add(self, _: nn.Module, _args: tuple[object, ...], embedded: torch.Tensor) -> torch.Tensor:
        if self.inputs is None:
            return embedded
        positions, mask = self.inputs.get("position_ids"), self.inputs.get("attention_mask")
        self.inputs = None
        if positions is None:  # a callback's call
            positions = torch.arange(embedded.shape[1], device=embedded.device)[None]
        if positions.ndim == 3:  # of several axes; the first ones tell documents apart
            positions = positions[0]
        limit = self.alpha / (document_lengths(positions, mask) * embedded.shape[-1]).sqrt()
        noise = torch.empty_like(embedded).uniform_(-1, 1)
        return embedded + noise * limit.unsqueeze(-1).to(noise.dtype)

    def end(self, module: nn.Module, _args: tuple[object, ...], _output: object) -> None:
        if self.inputs is not None:
            raise ModelError(
                f"model.neftune_noise_alpha: {type(module).__name__} does not call its input "
                "embeddings, so they get no noise; remove the setting"
            )


def document_lengths(position_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """[B, T] int64: the number of tokens of the document around each token. ``position_ids``
    [B, T] are 0 at the first token of each document, ``mask`` [B, T] is 0 for padding."""
    if mask is not None:
        return mask.sum(1, keepdim=True).expand_as(mask)
    document = (position_ids == 0).cumsum(1)
    counts = torch.zeros_like(document).scatter_add_(1, document - 1, torch.ones_like(document))
    return counts.gather(1, document - 1)
