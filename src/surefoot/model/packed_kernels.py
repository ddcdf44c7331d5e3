"""Kernels that compute all documents of a packed row at once, and the self-check that selects one.

``run.policy`` calls ``choose`` once, before the first step, and ``use`` with its result; a resume
keeps the kernel and calls ``use`` alone. ``choose`` takes the first of ``candidates`` that passes a
self-check on a row of the run's own shapes and type. Kernels round differently, so a choice by
timing would make the numbers of a run depend on chance (docs/decisions/0041). What a kernel cannot
do (windows, capped scores, dropout) goes through SDPA, one call per document.

Shapes: H heads, T tokens of the row, E size of a head, D documents, R responses of a document.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from itertools import pairwise
from typing import cast

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from transformers import PreTrainedModel

from ..batch import sent
from ..errors import first_line
from ..log import fell_back
from .config import size_of
from .numerics import deterministically
from .packed_attention import (
    PREFIX,
    DocumentBounds,
    Heads,
    by_document,
    register_attention,
    sdpa,
    set_attention,
    with_fetched,
)

logger = logging.getLogger(__name__)
BY_DOCUMENT = "sdpa"  # the name of the choice that needs no kernel of this module

# heads, bounds, scale of the scores (None: E to the power of -1/2): [1, T, H, E]
RowKernel = Callable[[Heads, DocumentBounds, float | None], torch.Tensor]


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
        generator = torch.Generator(self.device).manual_seed(0)
        options = {"device": self.device, "dtype": self.dtype}
        return [
            torch.randn(1, count, self.bounds[-1], self.head_dim, generator=generator, **options)  # type: ignore[call-overload]
            for count in (self.num_heads, self.num_key_value_heads, self.num_key_value_heads)
        ]


def row_of(
    model: PreTrainedModel, bounds: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Row:
    """A row of ``model`` with these documents."""
    config = model.config.get_text_config()
    num_heads = config.num_attention_heads
    num_key_value_heads = size_of(config, "num_key_value_heads")
    head_dim = size_of(config, "head_dim")
    return Row(
        num_heads,
        num_key_value_heads if isinstance(num_key_value_heads, int) else num_heads,
        head_dim if isinstance(head_dim, int) else config.hidden_size // num_heads,
        bounds,
        device,
        dtype,
    )


def choose(row: Row, kernels: Mapping[str, RowKernel] | None = None) -> str:
    """The name of the first kernel in order of preference that passes the self-check on ``row``."""
    kernels = candidates(row.device) if kernels is None else kernels
    expected = _output_and_gradients(one_call_per_document, row) if kernels else []
    chosen, rejected = BY_DOCUMENT, list[str]()
    for name, kernel in kernels.items():
        try:
            reason = _why_rejected(kernel, row, expected)
        except Exception as error:  # not built for this device, type or head size: next one
            reason = f"it fails ({first_line(error)})"
        if reason is None:
            chosen = name
            break
        rejected.append(f"{name}: {reason}")
    what = f"attention kernel: {chosen}, for rows that pack several documents"
    if rejected:
        fell_back(what, "; ".join(rejected), "may be slower", logging.INFO)
    else:
        logger.info(what)
    return chosen


def candidates(device: torch.device) -> dict[str, RowKernel]:
    """The kernels that may run on ``device``, by name, in order of preference.

    varlen comes first, since it is not compiled; flex knows every type and head size. torch has
    both, so a run has the same numbers whatever else is installed.
    """
    return {"varlen": varlen, "flex": flex} if device.type == "cuda" else {}


def _why_rejected(kernel: RowKernel, row: Row, expected: Sequence[torch.Tensor]) -> str | None:
    """How ``kernel`` differs from SDPA, or from itself where bits must repeat; None if it passes.

    The error may be 16 roundings of the largest value."""
    actual, repeated = (_output_and_gradients(kernel, row) for _ in range(2))
    values = ("result", "dq", "dk", "dv")
    names = (*values, *(f"{name} of responses that share a prompt" for name in values))
    for name, tensor, exact in zip(names, actual, expected, strict=True):
        tolerance = 16 * torch.finfo(row.dtype).eps * float(exact.abs().max())
        error = float((tensor.double() - exact.double()).abs().max())
        if not error <= tolerance:  # an error that is NaN fails, too
            return f"its {name} differs by {error:.2g} from that of sdpa, one call per document"
    is_repeated = all(map(torch.equal, actual, repeated))
    if torch.are_deterministic_algorithms_enabled() and not is_repeated:
        return "its bits differ from run to run (train.deterministic)"
    return None


def _output_and_gradients(kernel: RowKernel, row: Row) -> list[torch.Tensor]:
    """The output of ``kernel`` for ``row``, and the gradients of its inputs: of its documents, and
    of each as a prompt with responses."""
    results = []
    lengths = [stop - start for start, stop in pairwise(row.bounds)]
    branches = [(length - 3 * (length // 4), *[length // 4] * 3) for length in lengths]
    for bounds in (DocumentBounds(row.bounds), DocumentBounds(row.bounds, branches)):
        inputs = [tensor.requires_grad_() for tensor in row.inputs()]
        output = kernel(inputs, bounds, row.head_dim**-0.5)
        output.backward(torch.cos(output.detach()))  # type: ignore[no-untyped-call]
        gradients = [tensor.grad for tensor in inputs if tensor.grad is not None]
        results += [output.detach(), *gradients]
    return results


def one_call_per_document(
    heads: Heads, bounds: DocumentBounds, scaling: float | None
) -> torch.Tensor:
    """The reference of the self-check: SDPA, as packed rows use it without a kernel."""
    settings = {"document_bounds": bounds, "scaling": scaling}
    return by_document(sdpa)(nn.Identity(), *heads, None, **settings)[0]


def use(model: PreTrainedModel, name: str) -> str:
    """Let packed rows of ``model`` use the kernel ``name``. Returns the kernel that is used: SDPA,
    one call per document, where ``name`` is not available."""
    if name == BY_DOCUMENT:
        return name
    kernel = candidates(model.device).get(name)
    if kernel is None:
        why = f"{name}, used by the checkpoint, is not available on {model.device.type}"
        cost = "may be slower, and rounds differently"
        fell_back(f"attention kernel: {BY_DOCUMENT}, one call per document", why, cost)
        return BY_DOCUMENT
    register(name, kernel)
    set_attention(model, PREFIX + name)
    return name


@cache  # once for all its layers
def _say_by_document(name: str, layer: str) -> None:
    what, why = f"{layer} attends in one call per document", f"{name} has no dropout, window, "
    fell_back(what, why + "cap or sinks", "may be slower", logging.INFO)


def register(name: str, kernel: RowKernel) -> None:
    """Register ``kernel`` with transformers as ``PREFIX + name``."""
    attend_by_document = by_document(sdpa)

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        bounds = kwargs.get("document_bounds")
        unsupported = ("dropout", "sliding_window", "softcap")
        is_plain = not any(map(kwargs.get, unsupported)) and kwargs.get("s_aux") is None
        if not is_plain and isinstance(bounds, DocumentBounds):
            _say_by_document(name, type(module).__name__)
        if not is_plain or not isinstance(bounds, DocumentBounds):
            return attend_by_document(module, query, key, value, attention_mask, **kwargs)
        heads: Heads = (query, key, value)
        if torch.is_autocast_enabled(query.device.type):
            # Autocast casts them for SDPA and for no other kernel. A rotation by float32 angles has
            # made queries and keys float32, beside values in bfloat16.
            dtype = torch.get_autocast_dtype(query.device.type)
            heads = [tensor.to(dtype) for tensor in heads]
        scaling = cast("float | None", kwargs.get("scaling"))
        return kernel(with_fetched(heads, bounds), bounds, scaling).contiguous(), None

    register_attention(PREFIX + name, attend)


def varlen(heads: Heads, bounds: DocumentBounds, scaling: float | None) -> torch.Tensor:
    """torch's own flash attention for documents of any length."""
    device = heads[0].device
    segments = bounds.memoized("segments", lambda: _segments(bounds, device))
    if (tokens := segments.tokens) is not None:
        heads = [heads[0], *(tensor.index_select(2, tokens) for tensor in heads[1:])]
    attend = cast("Callable[..., torch.Tensor]", varlen_attn)
    options = {"enable_gqa": _shares_keys(heads)} if _takes_enable_gqa(attend) else {}

    def attend_row(heads: Heads) -> torch.Tensor:
        return attend(
            *(tensor[0].transpose(0, 1) for tensor in heads),  # [T, H, E] each
            segments.query_bounds,
            segments.key_bounds,
            *segments.longest,
            scale=scaling,
            window_size=(-1, 0),
            **options,
        )

    return deterministically(attend_row, heads)[None]


@cache
def _takes_enable_gqa(attend: Callable[..., torch.Tensor]) -> bool:
    """Whether shared keys need this argument; torch 2.11 infers them from shapes."""
    return "enable_gqa" in signature(attend).parameters


def _shares_keys(heads: Heads) -> bool:
    """Whether several query heads attend to one key-value head."""
    return heads[0].shape[1] != heads[1].shape[1]


@dataclass(frozen=True)
class _Segments:
    """Runs of queries, and of the keys that each sees: causal masks are aligned at their ends."""

    query_bounds: torch.Tensor  # [segments + 1] int32
    key_bounds: torch.Tensor  # [segments + 1] int32
    longest: tuple[int, int]  # run of queries, and of keys
    tokens: torch.Tensor | None  # [keys] whose they are; None: those of the row, in order


def _segments(bounds: DocumentBounds, device: torch.device) -> _Segments:
    """The documents of a row; a later response is a segment that sees the prompt and itself. Of a
    part of a row, its runs, whose keys are in order."""
    if bounds.part is not None:
        queries, keys = bounds.part.runs(None)
        longest_run = max(queries), max(keys)
        return _Segments(_cumulated(queries, device), _cumulated(keys, device), longest_run, None)
    if bounds.branches is None:
        on_device, longest = bounds.on(device), bounds.longest
        return _Segments(on_device, on_device, (longest, longest), None)
    num_queries, num_keys, tokens = list[int](), list[int](), list[torch.Tensor]()
    for start, (prompt, first_response, *later_responses) in zip(
        bounds.values, bounds.documents, strict=False
    ):
        stop = start + prompt + first_response
        num_queries.append(stop - start)
        num_keys.append(stop - start)
        tokens.append(torch.arange(start, stop))
        for length in filter(None, later_responses):
            num_queries.append(length)
            num_keys.append(prompt + length)
            tokens += [torch.arange(start, start + prompt), torch.arange(stop, stop + length)]
            stop += length
    query_bounds, key_bounds = (_cumulated(lengths, device) for lengths in (num_queries, num_keys))
    longest_runs = max(num_queries), max(num_keys)
    return _Segments(query_bounds, key_bounds, longest_runs, sent(torch.cat(tokens), device))


def _cumulated(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """[segments + 1] int32 where each one begins, and the last one ends."""
    return sent(torch.tensor([0, *lengths]).cumsum(0).int(), device)


def flex(heads: Heads, bounds: DocumentBounds, scaling: float | None) -> torch.Tensor:
    """torch's flex attention with a block mask that skips blocks outside of documents."""
    attend = cast("Callable[..., object]", _compiled() if heads[0].is_cuda else flex_attention)
    blocks = _blocks if bounds.part is None else _blocks_of_runs
    mask = bounds.memoized("blocks", lambda: blocks(bounds, heads[0].device))
    output = attend(*heads, block_mask=mask, scale=scaling, enable_gqa=_shares_keys(heads))
    return cast("torch.Tensor", output).transpose(1, 2)


@cache
def _compiled() -> Callable[..., object]:
    return torch.compile(flex_attention, dynamic=True)


def _blocks(bounds: DocumentBounds, device: torch.device) -> BlockMask:
    """A token sees those before it in its document that are of the prompt, or of its response."""
    starts, length = bounds.on(device), bounds.values[-1]
    document_T = torch.searchsorted(starts, torch.arange(length, device=device), right=True)
    lengths = torch.tensor(bounds.documents, dtype=torch.int64, device="cpu")  # [D, 1 + R]
    branch = torch.arange(lengths.shape[1], device="cpu").expand(lengths.shape)
    branch_T = sent(branch.flatten().repeat_interleave(lengths.flatten()), device)  # 0: the prompt

    def sees(
        _row: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        is_on_path = (branch_T[key] == 0) | (branch_T[key] == branch_T[query])
        return (query >= key) & (document_T[query] == document_T[key]) & is_on_path

    return create_block_mask(sees, None, None, length, length, device=str(device))


def _blocks_of_runs(bounds: DocumentBounds, device: torch.device) -> BlockMask:
    """Of a part of a row, a token sees the keys of its run up to itself."""
    assert bounds.part is not None
    lengths = [torch.tensor(each, device="cpu") for each in bounds.part.runs(None)]
    runs = [torch.repeat_interleave(each) for each in lengths]  # [L] and [X] which run it is of
    places = [
        torch.arange(len(run), device="cpu") - (each.cumsum(0) - each)[run]
        for run, each in zip(runs, lengths, strict=True)
    ]
    places[0] += (lengths[1] - lengths[0])[runs[0]]  # queries are the last of their keys
    (run_L, run_X), (place_L, place_X) = (
        [sent(each, device) for each in pair] for pair in (runs, places)
    )

    def sees(
        _row: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (run_L[query] == run_X[key]) & (place_L[query] >= place_X[key])

    return create_block_mask(sees, None, None, len(run_L), len(run_X), device=str(device))
