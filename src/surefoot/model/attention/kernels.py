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
from typing import cast

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from .packed import PREFIX, Bounds, by_document, sdpa

# [1, H, T, E] three times, bounds, scale of the scores (None: E to the power of -1/2): [1, T, H, E]
RowKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Bounds, float | None], torch.Tensor]


def _tokens_first(*rows_1HTE: torch.Tensor) -> list[torch.Tensor]:
    return [row[0].transpose(0, 1) for row in rows_1HTE]


def varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: Bounds,
    scaling: float | None,
) -> torch.Tensor:
    """torch's own flash attention for documents of any length."""
    starts, longest = bounds.on(query.device), bounds.longest
    q_THE, k_THE, v_THE = _tokens_first(query, key, value)
    found = varlen_attn(
        q_THE,
        k_THE,
        v_THE,
        starts,
        starts,
        longest,
        longest,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return cast("torch.Tensor", found)[None]


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: Bounds,
    scaling: float | None,
) -> torch.Tensor:
    """The package flash-attn."""
    from flash_attn import flash_attn_varlen_func

    starts, longest = bounds.on(query.device), bounds.longest
    found: torch.Tensor = flash_attn_varlen_func(
        *_tokens_first(query, key, value),
        starts,
        starts,
        longest,
        longest,
        softmax_scale=scaling,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return found[None]


def flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: Bounds,
    scaling: float | None,
) -> torch.Tensor:
    """torch's flex attention with a block mask that skips blocks outside of documents."""
    attend = cast("Callable[..., object]", _compiled() if query.is_cuda else flex_attention)
    mask = bounds.kept("blocks", lambda: _blocks(bounds, query.device))
    found = attend(
        query,
        key,
        value,
        block_mask=mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
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
        return kernel(query, key, value, bounds, scaling).contiguous(), None

    # as in ``attention``: not to be compiled for every number of documents
    AttentionInterface.register(PREFIX + name, torch.compiler.disable(attend))  # type: ignore[no-untyped-call]
