"""How decoder layers are computed: what they keep for the backward pass, compiled, in float8, with
LoRA in one function, with noise on the embeddings.

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

Fused LoRA: y = W x + b + scale B A x in one autograd function. PEFT adds the update to the base's
output, and autograd adds the two gradients of x: each is an additional pass over memory and another
copy. Here the second product of each pair is accumulated into the result of the first, forward and
backward. The scale is applied where there are only ``rank`` columns. Modules, names and files
remain PEFT's. PEFT adapts the weights of some linear layers as parameters, and would add the whole
update to the weight first; these are computed alike.

NEFTune (arXiv:2310.05914): uniform noise on the embeddings of tokens while a model is trained. The
noise of a token is at most ``alpha / sqrt(L d)``, with L tokens in its example and d hidden
dimensions, whatever is packed or padded beside the example.

Shapes: B rows, T tokens, I and O the sizes of input and output, R rank.
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
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import ModelError, RecipeError, installation
from .section import Recomputation

if TYPE_CHECKING:
    from peft.tuners.lora import Linear, ParamWrapper


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
    """As torch's ``save_on_cpu``, which waits for the GPU after each layer. Both copies are queued
    behind what makes the values, so that nobody has to."""
    if not torch.cuda.is_available():
        return torch.autograd.graph.save_on_cpu()

    def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return tensor.device, host.copy_(tensor, non_blocking=True)

    def unpack(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        device, host = packed
        return host.to(device, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


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
        compiled: Function = torch.compile(function, backend=backend, options=options, dynamic=True)
        return compiled

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
    named_modules = (pair for layer in layers for pair in layer.named_modules())
    before = sum(_is_suitable(module, name) for name, module in named_modules)
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
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        name = torch.cuda.get_device_name(device)
        raise ModelError(
            f"model.float8: {name} has compute capability {capability[0]}.{capability[1]}, "
            f"expected at least {OLDEST[0]}.{OLDEST[1]}; leave model.float8 unset"
        )
    return False


def _is_suitable(module: nn.Module, name: str) -> bool:
    if type(module) is not nn.Linear or name.rpartition(".")[2] in _ROUTERS:
        return False
    sizes = module.in_features, module.out_features
    return module.weight.requires_grad and not any(size % MULTIPLE for size in sizes)


Forward = Callable[..., torch.Tensor]


def enable_fused_lora(model: nn.Module) -> None:
    """Enable it for every linear layer that PEFT has adapted in ``model``, where possible."""
    from peft.tuners.lora import Linear

    for layer in model.modules():
        if (type(layer) is Linear or is_parameter(layer)) and "forward" not in vars(layer):
            layer.forward = partial(_forward, layer, layer.forward)


def disable_fused_lora(model: nn.Module) -> None:
    """Restore PEFT's own forward passes, which a compiler fuses itself, but for the weights adapted
    as parameters: PEFT replaces a module's class while it computes these."""
    for layer in model.modules():
        forward = None if is_parameter(layer) else vars(layer).get("forward")
        if isinstance(forward, partial) and forward.func is _forward:
            del layer.forward


def is_parameter(layer: nn.Module) -> bool:
    """Whether PEFT adapts the weight of a linear layer as a parameter in ``layer``."""
    from peft.tuners.lora import ParamWrapper

    return isinstance(layer, ParamWrapper) and isinstance(layer.base_layer, nn.Linear)


def count_fused(model: nn.Module) -> int:
    """The linear layers in which it is enabled."""
    forwards = (vars(layer).get("forward") for layer in model.modules())
    return sum(isinstance(forward, partial) and forward.func is _forward for forward in forwards)


def _forward(
    layer: Linear | ParamWrapper, theirs: Forward, x: torch.Tensor, *args: object, **named: object
) -> torch.Tensor:
    """The result of PEFT's own forward pass, which itself runs unless plain adapters are active:
    not for none, merged ones or DoRA. Several are computed as one if they have one scale."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    is_off = layer.disable_adapters or layer.merged or not names
    scales = {layer.scaling[name] for name in names}
    pairs = [(layer.lora_A[name], layer.lora_B[name]) for name in names]
    if is_off or args or named or layer.lora_variant or len(scales) > 1:
        return theirs(x, *args, **named)
    if any(b.bias is not None for _, b in pairs):
        return theirs(x)
    base, scale, kind = layer.base_layer, scales.pop(), x.device.type
    dropouts = [layer.lora_dropout[name] for name in names]
    mixes = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    uncast_x, x = x, x.to(torch.get_autocast_dtype(kind)) if mixes else x  # once for all matrices
    drops = layer.training and any(type(module) is not nn.Identity for module in dropouts)
    is_plain = all(_is_plain(module) for pair in pairs for module in (base, *pair))
    if not drops and is_plain and not base.weight.requires_grad:
        inputs = (base.weight, base.bias, *_joined(pairs))
        if mixes:
            inputs = tuple(t if t is None else t.to(x.dtype) for t in inputs)  # type: ignore[assignment]
        if all(t is None or t.dtype == x.dtype for t in inputs):
            fused: torch.Tensor = _LowRank.apply(x, *inputs, scale)  # type: ignore[no-untyped-call]
            return fused
    if len(pairs) > 1:
        return theirs(uncast_x)
    (a, b), dropout = pairs[0], dropouts[0]
    y: torch.Tensor = base(x)
    update: torch.Tensor = b(a(dropout(x if mixes else x.to(a.weight.dtype))) * scale)
    return (y + update).to(y.dtype)


def _joined(pairs: Sequence[tuple[nn.Linear, nn.Linear]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of all adapters as one pair: their sum is rounded once, so adapters that are
    large and nearly opposite lose no digits."""
    if len(pairs) == 1:
        return pairs[0][0].weight, pairs[0][1].weight
    both = [(a.weight, b.weight) for a, b in pairs]
    return torch.cat([a for a, _ in both]), torch.cat([b for _, b in both], 1)


def _is_plain(module: nn.Module) -> bool:
    """Whether only the matrix is active."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return type(module) is nn.Linear and "forward" not in vars(module) and not hooks


class _LowRank(torch.autograd.Function):
    """dy = g: dx = g W + scale (g B) A, dA = scale (g B)' x, dB = scale g' (A x)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        a_RI: torch.Tensor,
        b_OR: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        x_TI = x.reshape(-1, x.shape[-1])
        low_TR = x_TI @ a_RI.t()
        y_TO = F.linear(x_TI, weight_OI, bias_O).addmm_(low_TR, b_OR.t(), alpha=scale)
        saved_x = x if ctx.needs_input_grad[3] else None  # a frozen A needs no input
        ctx.save_for_backward(saved_x, weight_OI, a_RI, b_OR, low_TR)
        ctx.shape = x.shape
        ctx.scale = scale
        # what autograd takes for a view may not be changed in place, as some experts' layers do
        y: torch.Tensor = torch.ops.aten._unsafe_view(y_TO, [*x.shape[:-1], y_TO.shape[-1]])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight_OI, a_RI, b_OR, low_TR = ctx.saved_tensors
        of_x, _, _, of_a, of_b, _ = ctx.needs_input_grad
        g_TO = gradients[0].reshape(-1, gradients[0].shape[-1])
        g_TR = (g_TO @ b_OR).mul_(ctx.scale)
        g_x = (g_TO @ weight_OI).addmm_(g_TR, a_RI).view(ctx.shape) if of_x else None
        g_a = g_TR.t() @ x.reshape(-1, x.shape[-1]) if of_a else None
        g_b = (g_TO.t() @ low_TR).mul_(ctx.scale) if of_b else None
        return g_x, None, None, g_a, g_b, None


def add_embedding_noise(module: nn.Module, inner: PreTrainedModel, alpha: float) -> None:
    """Add noise to the embeddings of ``inner`` in each forward pass of ``module``, its adapter
    included, in training mode. Torch's generator of the device draws it."""
    noise = _EmbeddingNoise(alpha)
    module.register_forward_pre_hook(noise.begin, with_kwargs=True)
    module.register_forward_hook(noise.end)
    inner.get_input_embeddings().register_forward_hook(noise.add)


@dataclass
class _EmbeddingNoise:
    alpha: float
    rows: Mapping[str, Any] | None = None  # in a forward pass whose embeddings have no noise yet

    def begin(self, module: nn.Module, _args: tuple[object, ...], rows: Mapping[str, Any]) -> None:
        self.rows = rows if module.training else None

    def add(
        self, _module: nn.Module, _args: tuple[object, ...], embedded: torch.Tensor
    ) -> torch.Tensor:
        if self.rows is None:
            return embedded
        positions, mask = self.rows.get("position_ids"), self.rows.get("attention_mask")
        self.rows = None
        if positions is None:  # a callback's call
            positions = torch.arange(embedded.shape[1], device=embedded.device)[None]
        if positions.ndim == 3:  # of several axes; the first ones tell documents apart
            positions = positions[0]
        limit = self.alpha / (document_lengths(positions, mask) * embedded.shape[-1]).sqrt()
        noise = torch.empty_like(embedded).uniform_(-1, 1)
        return embedded + noise * limit.unsqueeze(-1).to(noise.dtype)

    def end(self, module: nn.Module, _args: tuple[object, ...], _output: object) -> None:
        if self.rows is not None:
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
