"""Attention over a packed row in one kernel, where a device has one that knows documents.

Each is a candidate only: ``choose`` takes the first one that gives what SDPA gives with
one call per document. What it cannot do (windows, capped scores, dropout, prompts that two answers
share) goes through SDPA, one call per document.

Shapes: H heads, T tokens of the row, E size of a head.

The packed-attention kernel: the first in a fixed order of preference that passes a self-check.

Kernels round differently, so a choice by timing would make the numbers of a run depend on chance.
The order is ``candidates``: on a CPU SDPA, one call per document; on a GPU varlen,
flash-attn, flex attention, then SDPA. A candidate is skipped, with its reason in the log, if it
fails on a row of the run's own shapes and type, differs from SDPA one document at a time, or, with
``train.deterministic``, does not repeat its bits. A resume keeps the kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from inspect import signature
from typing import cast

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from ...errors import first_line
from .packed import PREFIX, Bounds, Heads, by_document, deterministically, in_groups, sdpa

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

    # as in ``packed``: not to be compiled for every number of documents
    AttentionInterface.register(PREFIX + name, torch.compiler.disable(in_groups(attend)))  # type: ignore[no-untyped-call]


logger = logging.getLogger(__name__)
BY_DOCUMENT = "sdpa"


@dataclass(frozen=True)
class Row:
    """A packed row for testing kernels."""

    num_heads: int
    num_key_value_heads: int
    head_dim: int
    bounds: Sequence[int]
    device: torch.device
    dtype: torch.dtype

    def inputs(self) -> list[torch.Tensor]:
        """Random queries, keys and values, [1, H, T, E] each; the same ones every time."""
        dice = torch.Generator(self.device).manual_seed(0)
        heads = (self.num_heads, self.num_key_value_heads, self.num_key_value_heads)
        shapes = [(1, count, self.bounds[-1], self.head_dim) for count in heads]
        options = {"device": self.device, "dtype": self.dtype}
        return [torch.randn(shape, generator=dice, **options) for shape in shapes]  # type: ignore[call-overload]


def row_of(
    model: PreTrainedModel, bounds: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Row:
    """A row of ``model`` with these documents."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    return Row(
        num_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        bounds=bounds,
        device=device,
        dtype=dtype,
    )


def choose(row: Row, kernels: Mapping[str, RowKernel] | None = None) -> str:
    """The name of the first kernel in order of preference that passes the self-check on ``row``."""
    kernels = candidates(row.device) if kernels is None else kernels
    chosen = _first_correct(row, kernels) if kernels else None
    logger.info("attention kernel: %s, for rows that pack several documents", chosen or BY_DOCUMENT)
    return chosen or BY_DOCUMENT


def _first_correct(row: Row, kernels: Mapping[str, RowKernel]) -> str | None:
    expected = _found(_by_document, row)
    for name, kernel in kernels.items():
        try:
            why = _why_not(kernel, row, expected)
        except Exception as error:  # not built for this device, type or head size: next one
            why = first_line(error)
        if why is None:
            return name
        logger.info("attention kernel: %s rejected: %s", name, why)
    return None


def use(model: PreTrainedModel, name: str) -> str:
    """Let packed rows of ``model`` use the kernel ``name``. Returns the kernel that is used: SDPA,
    one call per document, where ``name`` is not available."""
    if name == BY_DOCUMENT:
        return name
    kernel = candidates(model.device).get(name)
    if kernel is None:
        logger.warning(
            "attention kernel: %s, used by the checkpoint, is not available; using %s, "
            "one call per document",
            name,
            BY_DOCUMENT,
        )
        return BY_DOCUMENT
    register(name, kernel)
    model.set_attn_implementation(PREFIX + name)
    return name


def _by_document(heads: Heads, bounds: Bounds, scaling: float | None) -> torch.Tensor:
    settings = {"document_bounds": bounds, "scaling": scaling}
    return by_document(sdpa)(torch.nn.Identity(), *heads, None, **settings)[0]


def _found(kernel: RowKernel, row: Row) -> list[torch.Tensor]:
    """The output of ``kernel`` for ``row``, and the gradients of its inputs."""
    inputs = [tensor.requires_grad_() for tensor in row.inputs()]
    found = kernel(inputs, Bounds(row.bounds), row.head_dim**-0.5)
    found.backward(torch.cos(found.detach()))  # type: ignore[no-untyped-call]
    return [found.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]


def _why_not(kernel: RowKernel, row: Row, expected: Sequence[torch.Tensor]) -> str | None:
    first, second = (_found(kernel, row) for _ in range(2))
    for name, here, there in zip(("result", "dq", "dk", "dv"), first, expected, strict=True):
        bound = 16 * torch.finfo(row.dtype).eps * float(there.abs().max())
        error = float((here.double() - there.double()).abs().max())
        if not error <= bound:
            return f"its {name} differs by {error:.2g} from that of sdpa, one call per document"
    is_same = all(map(torch.equal, first, second))
    if torch.are_deterministic_algorithms_enabled() and not is_same:
        return "its bits differ from run to run (train.deterministic)"
    return None
