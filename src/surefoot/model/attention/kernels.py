"""Attention over a packed row in one kernel, where a device has one that knows documents.

Each is a candidate only: ``selection`` takes the first one that gives what SDPA gives with
one call per document. What it cannot do (windows, capped scores, dropout, prompts that two answers
share) goes through SDPA, one call per document.

Shapes: H heads, T tokens of the row, E size of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from inspect import signature
from typing import cast

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from .bounds import Bounds
from .deterministic import deterministically
from .packed import PREFIX, Heads, by_document, sdpa
from .shifted import in_groups

# heads, bounds, scale of the scores (None: E to the power of -1/2): [1, T, H, E]
RowKernel = Callable[[Heads, Bounds, float | None], torch.Tensor]


def _tokens_first(heads: Heads) -> list[torch.Tensor]:
    return [each[0].transpose(0, 1) for each in heads]


def _shares_keys(heads: Heads) -> bool:
    """Whether several query heads attend to one key-value head."""
    return heads[0].shape[1] != heads[1].shape[1]


def varlen(heads: Heads, bounds: Bounds, scaling: float | None) -> torch.Tensor:
    """torch's own flash attention for documents of any length."""
    starts, longest = bounds.on(heads[0].device), bounds.longest
    attend = cast("Callable[..., torch.Tensor]", varlen_attn)
    shared = {"enable_gqa": _shares_keys(heads)} if _takes_enable_gqa(attend) else {}

    def rows(inside: Heads) -> torch.Tensor:
        return attend(
            *_tokens_first(inside),
            *(starts, starts, longest, longest),
            scale=scaling,
            window_size=(-1, 0),
            **shared,
        )

    return deterministically(rows, heads)[None]


@cache
def _takes_enable_gqa(attend: Callable[..., torch.Tensor]) -> bool:
    """Whether shared keys need this argument; torch 2.11 infers them from shapes."""
    return "enable_gqa" in signature(attend).parameters


def flash(heads: Heads, bounds: Bounds, scaling: float | None) -> torch.Tensor:
    """The package flash-attn."""
    from flash_attn import flash_attn_varlen_func

    starts, longest = bounds.on(heads[0].device), bounds.longest
    found: torch.Tensor = flash_attn_varlen_func(
        *_tokens_first(heads),
        *(starts, starts, longest, longest),
        softmax_scale=scaling,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return found[None]


def flex(heads: Heads, bounds: Bounds, scaling: float | None) -> torch.Tensor:
    """torch's flex attention with a block mask that skips blocks outside of documents."""
    attend = cast("Callable[..., object]", _compiled() if heads[0].is_cuda else flex_attention)
    mask = bounds.kept("blocks", lambda: _blocks(bounds, heads[0].device))
    found = attend(*heads, block_mask=mask, scale=scaling, enable_gqa=_shares_keys(heads))
    return cast("torch.Tensor", found).transpose(1, 2)


@cache
def _compiled() -> Callable[..., object]:
    return torch.compile(flex_attention, dynamic=True)


def _blocks(bounds: Bounds, device: torch.device) -> BlockMask:
    starts, length = bounds.on(device), bounds.values[-1]
    document_T = torch.searchsorted(starts, torch.arange(length, device=device), right=True)

    def sees(
        _row: torch.Tensor, _head: torch.Tensor, here: torch.Tensor, there: torch.Tensor
    ) -> torch.Tensor:
        return (here >= there) & (document_T[here] == document_T[there])

    return create_block_mask(sees, None, None, length, length, device=str(device))


def candidates(device: torch.device) -> dict[str, RowKernel]:
    """The kernels that may run on ``device``, by name, in order of preference.

    varlen comes first because every CUDA build of torch has it, so that a run has the same numbers
    whether flash-attn is installed or not. flex knows every type and head size, but is compiled.
    """
    if device.type != "cuda":
        return {}
    optional: dict[str, RowKernel] = {"flash": flash} if find_spec("flash_attn") else {}
    return {"varlen": varlen, **optional, "flex": flex}


def register(name: str, kernel: RowKernel) -> None:
    """Register ``kernel`` with transformers as ``PREFIX + name``."""
    otherwise = by_document(sdpa)

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        bounds, special = kwargs.get("document_bounds"), ("dropout", "sliding_window", "softcap")
        is_plain = not any(kwargs.get(name) for name in special) and kwargs.get("s_aux") is None
        if not is_plain or not isinstance(bounds, Bounds) or bounds.branches is not None:
            return otherwise(module, query, key, value, attention_mask, **kwargs)
        scaling = cast("float | None", kwargs.get("scaling"))
        return kernel((query, key, value), bounds, scaling).contiguous(), None

    # as in ``attention``: not to be compiled for every number of documents
    AttentionInterface.register(PREFIX + name, torch.compiler.disable(in_groups(attend)))  # type: ignore[no-untyped-call]
