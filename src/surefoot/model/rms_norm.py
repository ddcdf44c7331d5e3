"""RMSNorm that keeps for the backward pass its input, as it is, and a number for each token.

transformers computes it in float32 by several functions of autograd, of which some keep float32
copies of the row: of a bfloat16 row, they take more memory than all else that a layer keeps beside
its products. Here it is one function (arXiv:1910.07467), whose values have transformers' bits. Both
passes work on some tokens at a time, so float32 values never exist for all of a long row.

``fuse_norms`` finds the modules by trying, without names: a module with one vector is RMSNorm if it
has the bits of one of its forms.

Shapes: T tokens, D hidden dimensions. y = w x r with r = (mean x² + eps)^(-1/2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.func import functional_call

Form = Literal["rounded", "float32", "plus_one"]
FORMS: tuple[Form, ...] = ("rounded", "float32", "plus_one")  # of Llama, of GPT-OSS, of Gemma
_OF_CODE = (RuntimeError, ValueError, TypeError, IndexError, AttributeError)
# Elements that are computed at a time: few enough for the caches of a CPU, and on a GPU so many
# that starting kernels takes no time. For fewer ones, calls take longer than they save.
_MOST_ON_CPU, _MOST_ON_GPU = 1 << 16, 1 << 23


def fuse_norms(model: nn.Module) -> int:
    """Compute each RMSNorm in ``model`` in one autograd function; returns how many there are."""
    forms = dict[object, tuple[Form, float] | None]()
    for module in model.modules():
        if "forward" in vars(module) or [p.ndim for p in module.parameters()] != [1]:
            continue
        key = (type(module), *_numbers(module), *(p.shape for p in module.parameters()))
        if key not in forms:
            forms[key] = _form_of(module)
        if (form := forms[key]) is not None:
            module.forward = partial(_fused_forward, module, module.forward, *form)
    return sum(map(is_fused, model.modules()))


def restore_norms(model: nn.Module) -> None:
    """Undo ``fuse_norms``: a compiler fuses the plain functions itself."""
    for module in model.modules():
        if is_fused(module):
            del module.forward


def is_fused(module: nn.Module) -> bool:
    """Whether ``fuse_norms`` has found it."""
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is _fused_forward


def _numbers(module: nn.Module) -> list[float]:
    return [value for value in vars(module).values() if isinstance(value, float)]


def _form_of(module: nn.Module) -> tuple[Form, float] | None:
    """The form of RMSNorm that ``module`` computes, and its epsilon; None: it is none."""
    ((name, parameter),) = module.named_parameters()
    generator = torch.Generator().manual_seed(0)
    # lengths around that of epsilon, too, so that another epsilon has other values
    x_TD = (
        torch.randn(8, len(parameter), generator=generator) * 10.0 ** torch.arange(-5, 3)[:, None]
    )
    w_D = torch.randn(len(parameter), generator=generator)
    narrow = torch.bfloat16
    trials = [(x_TD.to(x), w_D.to(w)) for x, w in product((torch.float32, narrow), repeat=2)]
    try:
        with torch.no_grad():
            results = [functional_call(module, {name: w}, (x,)) for x, w in trials]
    except _OF_CODE:
        return None  # it takes something else
    for form, eps in product(FORMS, _numbers(module)):
        values = [_normed(x, w, form, eps) for x, w in trials]
        if all(map(_same, values, results)):
            return form, eps
    return None


def _same(one: torch.Tensor, other: object) -> bool:
    return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)


def _fused_forward(
    module: nn.Module, forward: Callable[..., torch.Tensor], form: Form, eps: float, x: torch.Tensor
) -> torch.Tensor:
    """The result of the module's own forward pass. That one runs for few tokens, where nothing is
    kept, and for tensors that are divided among ranks."""
    (weight,) = module.parameters()
    is_kept = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    is_divided = isinstance(x, DTensor) or isinstance(weight, DTensor)
    if not is_kept or is_divided or x.numel() < _MOST_ON_CPU:
        return forward(x)
    y: torch.Tensor = _RMSNorm.apply(x, weight, form, eps)  # type: ignore[no-untyped-call]
    return y


def _inverse(x_TD: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rsqrt(x_TD.pow(2).mean(-1, keepdim=True) + eps)


def _normed(x_TD: torch.Tensor, w_D: torch.Tensor, form: Form, eps: float) -> torch.Tensor:
    x32_TD = x_TD.float()
    return _scaled(x32_TD * _inverse(x32_TD, eps), w_D, form, x_TD.dtype)


def _scaled(h_TD: torch.Tensor, w_D: torch.Tensor, form: Form, dtype: torch.dtype) -> torch.Tensor:
    if form == "rounded":
        return w_D * h_TD.to(dtype)
    return (h_TD * (1.0 + w_D.float()) if form == "plus_one" else w_D * h_TD).to(dtype)


def _tiles(x_TD: torch.Tensor) -> Iterator[slice]:
    most = _MOST_ON_GPU if x_TD.is_cuda else _MOST_ON_CPU
    return tiles(x_TD, max(1, most // x_TD.shape[-1]))


def tiles(x: torch.Tensor, size: int, dim: int = 0) -> Iterator[slice]:
    """Slices of ``size`` along ``dim`` of ``x``. Of fake tensors, the first two and the last one:
    a dry run counts memory, in which all but the last are alike, and two exist at once. Of 500,000
    tokens, each norm of an 8 B model would have 31,250 tiles."""
    length = x.shape[dim]
    starts = range(0, length, size)
    some = sorted({0, starts[1], starts[-1]}) if len(starts) > 2 else starts
    for start in some if isinstance(x, FakeTensor) else starts:
        yield slice(start, min(start + size, length))


class _RMSNorm(torch.autograd.Function):
    """With h = x r and g the gradient of h: dx = r (g - h mean(g h)), dw = sum over T of dy h."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w_D: torch.Tensor, form: Form, eps: float
    ) -> torch.Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        is_wider = form == "rounded"
        y_TD = x_TD.new_empty(
            x_TD.shape, dtype=torch.promote_types(x.dtype, w_D.dtype) if is_wider else x.dtype
        )
        r_T1 = x_TD.new_empty(len(x_TD), 1, dtype=torch.float32)
        for tile in _tiles(x_TD):
            x32_TD = x_TD[tile].float()
            r_T1[tile] = r = _inverse(x32_TD, eps)
            y_TD[tile] = _scaled(x32_TD * r, w_D, form, x.dtype)
        ctx.save_for_backward(x, w_D, r_T1)
        ctx.form = form
        return y_TD.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w_D, r_T1 = ctx.saved_tensors
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        exact = torch.promote_types(x.dtype, torch.float32)
        x_TD, dy_TD = x.reshape(-1, x.shape[-1]), gradients[0].reshape(-1, x.shape[-1])
        dx_TD = torch.empty_like(x_TD) if needs_dx else None
        dw_D = torch.zeros(w_D.shape, dtype=exact, device=x.device) if needs_dw else None
        scale_D = 1.0 + w_D.float() if ctx.form == "plus_one" else w_D
        for tile in _tiles(x_TD):
            h_TD, dy = x_TD[tile].to(exact) * r_T1[tile], dy_TD[tile].to(exact)
            if dw_D is not None:
                dw_D += (dy * h_TD).sum(0)
            if dx_TD is not None:
                g_TD = dy * scale_D
                mean_T1 = (g_TD * h_TD).mean(-1, keepdim=True)
                dx_TD[tile] = g_TD.addcmul_(h_TD, mean_T1, value=-1).mul_(r_T1[tile])
        dx = None if dx_TD is None else dx_TD.view(x.shape)
        return dx, None if dw_D is None else dw_D.to(w_D.dtype), None, None
