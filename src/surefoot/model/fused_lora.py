"""Fused LoRA linear: y = W x + b + scale B A x in one autograd function.

PEFT adds the update to the base's output, and autograd adds the two gradients of x: each is an
additional pass over memory and another copy. Here the second product of each pair is accumulated
into the result of the first, forward and backward. The scale is applied where there are only
``rank`` columns. Modules, names and files remain PEFT's. PEFT adapts the weights of some linear
layers as parameters, and would add the whole update to the weight first; these are computed alike.

Shapes: T tokens, I and O the sizes of input and output, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    given_x, x = x, x.to(torch.get_autocast_dtype(kind)) if mixes else x  # once for all matrices
    drops = layer.training and any(type(one) is not nn.Identity for one in dropouts)
    is_plain = all(_is_plain(module) for pair in pairs for module in (base, *pair))
    if not drops and is_plain and not base.weight.requires_grad:
        given = (base.weight, base.bias, *_joined(pairs))
        if mixes:
            given = tuple(t if t is None else t.to(x.dtype) for t in given)  # type: ignore[assignment]
        if all(t is None or t.dtype == x.dtype for t in given):
            found: torch.Tensor = _LowRank.apply(x, *given, scale)  # type: ignore[no-untyped-call]
            return found
    if len(pairs) > 1:
        return theirs(given_x)
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
        kept = x if ctx.needs_input_grad[3] else None  # a frozen A needs no input
        ctx.save_for_backward(kept, weight_OI, a_RI, b_OR, low_TR)
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
        found = [None, None, None]
        if of_x:
            found[0] = (g_TO @ weight_OI).addmm_(g_TR, a_RI).view(ctx.shape)
        if of_a:
            found[1] = g_TR.t() @ x.reshape(-1, x.shape[-1])
        if of_b:
            found[2] = (g_TO.t() @ low_TR).mul_(ctx.scale)
        return found[0], None, None, found[1], found[2], None
