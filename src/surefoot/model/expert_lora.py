"""LoRA on experts that transformers holds fused in parameters ``[E, O, I]`` or ``[E, I, O]``.

PEFT adds the update to the values of the parameter, so each layer forms ``W + scale B A`` of all
its experts, keeps it for the backward pass, and computes there a gradient as large. Here the rows
of each expert, sorted as transformers' ``grouped_mm`` sorts them, are multiplied by ``A`` and ``B``
beside ``W``: what is kept is ``rank`` numbers for each row. Modules, names and files remain PEFT's.

Shapes: T tokens, K experts of each, S = T K rows, E experts, I and O the sizes of input and output,
R rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from ..parallel.progress import wait_for_ranks

if TYPE_CHECKING:
    from peft.tuners.lora import ParamWrapper

_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_KERNEL_CAPABILITY = (8, 0)  # of a GPU
_MULTIPLE = 8  # of the rank: kernels expect rows of a multiple of 16 bytes


def computes_grouped(experts: nn.Module) -> bool:
    """Whether transformers computes ``experts`` by ``grouped_mm``, all of them on this rank."""
    config: Any = vars(experts).get("config")
    if vars(experts).get("_is_expert_parallel") is not False or "forward" in vars(experts):
        return False
    return bool(config._experts_implementation == "grouped_mm")


@torch.compiler.disable  # type: ignore[untyped-decorator]  # kernels are called as they are
def grouped_forward(
    layer: ParamWrapper,
    peft_forward: Callable[..., torch.Tensor],
    x_TI: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """What PEFT's own forward pass of experts returns. That is called, too, where an adapter is
    switched off or merged, and where there are several."""
    experts: Any = layer.get_base_layer()
    updates = _updates(layer)
    has_hooks = experts._forward_hooks or experts._forward_pre_hooks
    if updates is None or len(args) != 2 or kwargs or has_hooks:
        return peft_forward(x_TI, *args, **kwargs)
    experts_TK, weights_TK = args
    num_each = experts_TK.shape[-1]
    experts_S, order_S = torch.sort(experts_TK.reshape(-1), stable=True)
    every_E = torch.arange(experts.num_experts, device=experts_S.device)
    ends_E = torch.searchsorted(experts_S, every_E, right=True).int()

    def multiplied(name: str, x: torch.Tensor) -> torch.Tensor:
        weight = getattr(experts, name)
        x = x.to(weight.dtype)
        y = _products(x, weight if experts.is_transposed else weight.mT, ends_E)
        if experts.has_bias:
            y = y + getattr(experts, f"{name}_bias")[experts_S]
        if name not in updates:
            return y
        a_ERI, b_EOR, scale = updates[name]
        low_SR = _products(x, a_ERI.to(weight.dtype).mT, ends_E)
        return y.add_(_products(low_SR, b_EOR.to(weight.dtype).mT, ends_E), alpha=scale)

    y = multiplied("gate_up_proj" if experts.has_gate else "up_proj", x_TI[order_S // num_each])
    y = experts._apply_gate(y) if experts.has_gate else experts.act_fn(y)
    y = multiplied("down_proj", y)
    if experts.has_post_expert_norm:
        y = experts.post_expert_norm(y)
    y = y * weights_TK.reshape(-1)[order_S, None]
    # Back in the order of tokens and summed there: adding by index has no order of its own on a GPU
    rows_S = torch.empty_like(order_S)
    rows_S[order_S] = torch.arange(len(order_S), device=order_S.device)
    y_TO: torch.Tensor = y[rows_S].unflatten(0, (-1, num_each)).sum(1)
    return y_TO.to(x_TI.dtype)


def _updates(layer: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]] | None:
    """``A`` [E, R, I], ``B`` [E, O, R] and the scale of each adapted parameter of the experts in
    ``layer``, one wrapper around another; None if they are no one adapter's."""
    from peft.tuners.lora import ParamWrapper

    updates = {}
    while isinstance(layer, ParamWrapper):
        names = [name for name in layer.active_adapters if name in layer.lora_A]
        weight = layer.get_param()
        if layer.disable_adapters or layer.merged or len(names) > 1 or weight.ndim != 3:
            return None
        for name in names:
            a, b, num_experts = layer.lora_A[name].weight, layer.lora_B[name].weight, len(weight)
            # PEFT orders the rows of A by expert, then rank, and the columns of B by rank, then
            # expert.
            a_ERI = a.view(num_experts, -1, a.shape[1])
            b_EOR = b.view(len(b), -1, num_experts).permute(2, 0, 1)
            padding = -a_ERI.shape[1] % _MULTIPLE
            b_EOR = F.pad(b_EOR, (0, padding)).contiguous()
            a_ERI = F.pad(a_ERI, (0, 0, 0, padding))
            updates[layer.parameter_name] = a_ERI, b_EOR, layer.scaling[name]
        layer = layer.base_layer
    return updates


def _products(x_SI: torch.Tensor, weight_EIO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """[S, O]: the rows of each expert, which end at ``ends_E``, multiplied by its matrix."""
    is_old = x_SI.is_cuda and torch.cuda.is_available()
    is_old = is_old and torch.cuda.get_device_capability(x_SI.device) < _KERNEL_CAPABILITY
    if x_SI.dtype in _KERNEL_DTYPES and not is_old:
        return F.grouped_mm(x_SI, weight_EIO, offs=ends_E)
    sizes = wait_for_ranks(ends_E.diff(prepend=ends_E.new_zeros(1)).tolist)
    rows = zip(torch.split(x_SI, sizes), weight_EIO, strict=True)
    return torch.cat([x @ weight for x, weight in rows])
