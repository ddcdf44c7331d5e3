"""RMSNorm and rotary positions in fewer passes over memory, on a CPU in float32.

Transformers writes them as a dozen small operations, each of which reads and writes all of the
hidden states, and autograd as many more. Written as one function each, with their gradients, a
norm takes half of the time and rotation less (see benchmarks/RESULTS.md). Which modules they may
stand in for is tried out on random numbers, not looked up in a list.

Shapes: B rows, T tokens, D hidden size, H heads, E size of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

Function = Callable[..., Any]
_ROTATE = "apply_rotary_pos_emb"  # what modeling files call it
_EPSILONS = ("variance_epsilon", "eps")


def use_fewer_passes(model: nn.Module) -> None:
    """Let the norms of ``model``, and the rotations in its attention, compute so wherever that is
    the same."""
    known: dict[type[nn.Module], Function | None] = {}
    for module in model.modules():
        kind = type(module)
        if "forward" in vars(module):
            continue
        if kind not in known:
            known[kind] = _with_norm(module) or _with_rotation(kind)
        forward = known[kind]
        if forward is not None:
            module.forward = MethodType(forward, module)


def leave_fewer_passes(model: nn.Module) -> None:
    """Let transformers' own code be there again, for a compiler, which fuses it itself."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, MethodType) and _is_ours(forward.__func__):
            del module.forward


def _is_ours(forward: Function) -> bool:
    rotation = getattr(forward, "__globals__", {}).get(_ROTATE)
    return forward is _normed or (isinstance(rotation, partial) and rotation.func is _rotated)


def _is_measured(*tensors: torch.Tensor) -> bool:
    """Whether it is known that ours is faster for these."""
    return all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)


def _normed(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    if not _is_measured(x, weight):
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    return rms_norm(x, weight, _epsilon(module))


def _epsilon(module: nn.Module) -> float:
    return next(float(vars(module)[name]) for name in _EPSILONS if name in vars(module))


@torch.no_grad()
def _with_norm(module: nn.Module) -> Function | None:
    """Our forward pass of a norm, if ``module`` is the norm that we know, told by random
    numbers."""
    named = dict(module.named_parameters())
    has_epsilon = any(name in vars(module) for name in _EPSILONS)
    if set(named) != {"weight"} or named["weight"].ndim != 1 or not has_epsilon:
        return None
    dice = torch.Generator().manual_seed(0)
    shapes = named["weight"].shape, (3, len(named["weight"]))
    values, x = (torch.randn(shape, generator=dice, device="cpu") for shape in shapes)
    x = x / 100  # so that the epsilon counts
    try:
        theirs = torch.func.functional_call(module, {"weight": values}, (x,))
    except (RuntimeError, TypeError, ValueError):
        return None
    return _normed if _is_close(theirs, rms_norm(x, values, _epsilon(module))) else None


def _is_close(theirs: object, ours: torch.Tensor) -> bool:
    if not isinstance(theirs, torch.Tensor) or theirs.shape != ours.shape:
        return False
    return torch.allclose(theirs, ours, rtol=1e-5, atol=1e-6)


def rms_norm(x_BTD: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Of each token's x: w x / rms(x), arXiv:1910.07467."""
    return _RMSNorm.apply(x_BTD, weight_D, epsilon)  # type: ignore[no-untyped-call,no-any-return]


class _RMSNorm(torch.autograd.Function):
    """With r = 1 / rms(x): dx = r (g w - x r² mean(g w x)), dw = sum of g x r over the tokens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
        norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight_D, inverse)
        return (x * inverse).mul_(weight_D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved: tuple[torch.Tensor, ...] = ctx.saved_tensors
        x, weight_D, inverse = saved
        size = x.shape[-1]
        g_ND, x_ND, inverse_N1 = (t.reshape(-1, t.shape[-1]) for t in (gradients[0], x, inverse))
        product_ND = g_ND * x_ND
        of_x = of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (inverse_N1.t() @ product_ND).view(size)
        if ctx.needs_input_grad[0]:
            share_N1 = (product_ND @ weight_D)[:, None].mul_(inverse_N1.pow(3)).div_(-size)
            of_x = torch.mul(g_ND, weight_D, out=product_ND).mul_(inverse_N1)
            of_x = of_x.addcmul_(x_ND, share_N1).view(x.shape)
        return of_x, of_weight, None


def _with_rotation(kind: type[nn.Module]) -> Function | None:
    """The forward pass of ``kind`` with our rotation in the place of its own, if that is the
    same."""
    forward = kind.forward
    if not isinstance(forward, FunctionType) or _ROTATE not in forward.__code__.co_names:
        return None
    names = dict(forward.__globals__)
    theirs = names.get(_ROTATE)
    if theirs is None or not _is_rotating(theirs):
        return None
    names[_ROTATE] = partial(_rotated, theirs)
    defaults, cells = forward.__defaults__, forward.__closure__
    made = FunctionType(forward.__code__, names, forward.__name__, defaults, cells)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


@torch.no_grad()
def _is_rotating(theirs: Function) -> bool:
    dice = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 5, 8), (2, 2, 5, 8), (2, 5, 8), (2, 5, 8)]
    given = [torch.randn(shape, generator=dice, device="cpu") for shape in shapes]
    try:
        found = theirs(*given)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    is_pair = isinstance(found, tuple) and len(found) == 2
    return is_pair and all(map(_is_close, found, rotated(*given)))


def _rotated(
    theirs: Function,
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *others: object,
    **named: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    is_whole = query.ndim == 4 and cos.ndim == 3 and cos.shape[-1] == query.shape[-1]
    if others or named or not is_whole or not _is_measured(query, key, cos, sin):
        return theirs(query, key, cos, sin, *others, **named)  # type: ignore[no-any-return]
    return rotated(query, key, cos, sin)


def rotated(
    query_BHTE: torch.Tensor, key_BHTE: torch.Tensor, cos_BTE: torch.Tensor, sin_BTE: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys, turned by their positions (arXiv:2104.09864), halves against halves."""
    return _Rotated.apply(query_BHTE, key_BHTE, cos_BTE, sin_BTE)  # type: ignore[no-untyped-call,no-any-return]


class _Rotated(torch.autograd.Function):
    """(x, y) of the two halves to (x cos - y sin, y cos + x sin); gradients turn back."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos[:, None], sin[:, None]
        ctx.save_for_backward(cos, sin)
        first, second = sin.chunk(2, dim=-1)
        return _turned(query, cos, -first, second), _turned(key, cos, -first, second)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        first, second = sin.chunk(2, dim=-1)
        found = (_turned(g, cos, second, -first) for g in gradients)
        return *found, None, None


def _turned(
    x_BHTE: torch.Tensor, cos: torch.Tensor, of_second: torch.Tensor, of_first: torch.Tensor
) -> torch.Tensor:
    """x cos, plus each half times what the other one takes of it."""
    found = x_BHTE * cos
    (to_first, to_second), (first, second) = (t.chunk(2, dim=-1) for t in (found, x_BHTE))
    to_first.addcmul_(second, of_second)
    to_second.addcmul_(first, of_first)
    return found
