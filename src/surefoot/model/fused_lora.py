"""Fused LoRA linear: y = W x + b + scale B A x in one autograd function.

PEFT adds the update to the base's output, and autograd adds the two gradients of x: each is an
additional pass over memory and another copy. Here the second product of each pair is accumulated
into the result of the first, forward and backward. The scale is applied where there are only
``rank`` columns. Modules, names and files remain PEFT's. PEFT adapts the weights of some linear
layers as parameters, and would add the whole update to the weight first; these are computed alike.

Shapes: T tokens, I and O the sizes of input and output, R rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:  # slow to import, and here only a name
    from peft.tuners.lora import Linear, ParamWrapper

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
    return sum(isinstance(found, partial) and found.func is _forward for found in forwards)


def _forward(
    layer: Linear | ParamWrapper, theirs: Forward, x: torch.Tensor, *args: object, **named: object
) -> torch.Tensor:
    """The result of PEFT's own forward pass, which itself runs unless exactly one plain adapter is
    active: not for none, several, merged ones or DoRA."""
    active = layer.active_adapters
    name = active[0] if len(active) == 1 else ""
    is_off = layer.disable_adapters or layer.merged or name not in layer.lora_A
    if is_off or args or named or name in layer.lora_variant:
        return theirs(x, *args, **named)
    base, a, b = layer.base_layer, layer.lora_A[name], layer.lora_B[name]
    if b.bias is not None:
        return theirs(x)
    scale, dropout, kind = layer.scaling[name], layer.lora_dropout[name], x.device.type
    mixes = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    x = x.to(torch.get_autocast_dtype(kind)) if mixes else x  # once, not for each matrix
    drops = layer.training and type(dropout) is not nn.Identity
    if not drops and all(map(_is_plain, (base, a, b))) and not base.weight.requires_grad:
        given = (base.weight, base.bias, a.weight, b.weight)
        if mixes:
            given = tuple(t if t is None else t.to(x.dtype) for t in given)  # type: ignore[assignment]
        if all(t is None or t.dtype == x.dtype for t in given):
            found: torch.Tensor = _LowRank.apply(x, *given, scale)  # type: ignore[no-untyped-call]
            return found
    y: torch.Tensor = base(x)
    update: torch.Tensor = b(a(dropout(x if mixes else x.to(a.weight.dtype))) * scale)
    return (y + update).to(y.dtype)


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
        ctx.save_for_backward(x, weight_OI, a_RI, b_OR, low_TR)
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
        found = [None, None, None]
        if of_x:
            found[0] = (g_TO @ weight_OI).addmm_(g_TR, a_RI).view(x.shape)
        if of_a:
            found[1] = g_TR.t() @ x.reshape(-1, x.shape[-1])
        if of_b:
            found[2] = (g_TO.t() @ low_TR).mul_(ctx.scale)
        return found[0], None, None, found[1], found[2], None
