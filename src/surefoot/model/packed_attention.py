"""Attention over packed rows: several documents in one row, each attending only to itself.

A dense block-diagonal mask over a row of T tokens costs T² work, while the documents need only the
sum of T_i². Measured here, one call per document on slices is 1.7 times as fast as the mask. So
packed rows run through attention functions of this module, which are registered with transformers
and for which no mask is built. Padded batches and generation use transformers' own functions.

Shapes: H heads, T tokens of the row, E size of a head.

Kernels that know documents: ``choose`` takes the first one of ``candidates`` that passes a
self-check. They round differently, so a choice by timing would make the numbers of a run depend on
chance. A candidate is skipped, with its reason in the log, if it fails on a row of the run's own
shapes and type, differs from SDPA one document at a time, or, with ``train.deterministic``, does
not repeat its bits. What it cannot do (windows, capped scores, dropout) goes through SDPA, one call
per document. A resume keeps the kernel.

Attention on a GPU that repeats its bits: torch's strict mode, for attention alone.

A run with ``train.deterministic`` has torch only warn of operations without a deterministic
algorithm, because some architectures contain one. But while torch only warns, its flash and
memory-efficient attention add the gradients of the queries in any order, and cuDNN's attention,
which has no such algorithm, may be selected. Both obey strict mode (torch 2.11, ``sdp_utils.cpp``
and ``attention_backward.cu``). So strict mode is on while an attention kernel is selected and
computes, forward and backward, and off everywhere else. Padded rows go through transformers' own
attention function, which stays as it is.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..batch import sent
from ..errors import ModelError, first_line
from .config import size_of
from .loading import on_meta, once_per_architecture


class Bounds:
    """The document boundaries of a row. A compiled layer passes this object on without reading it;
    for a list, it would be compiled again for each length.

    ``branches`` are the tokens of the prompt and of each response in each document, if some share a
    prompt (see ``Batch``).
    """

    def __init__(
        self, values: Sequence[int], branches: Sequence[Sequence[int]] | None = None
    ) -> None:
        self.values, self.branches = values, branches
        self._kept: dict[str, object] = {}

    @property
    def parts(self) -> Sequence[Sequence[int]]:
        """For each document, the tokens of the prompt and of each response, 0 of what is not there;
        one without responses is all prompt."""
        return self.branches or [(b - a, 0) for a, b in pairwise(self.values)]

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(b - a for a, b in pairwise(self.values))

    def on(self, device: torch.device) -> torch.Tensor:
        """[documents + 1] the bounds as int32 on ``device``."""
        bounds = self.kept(
            "bounds", lambda: sent(torch.tensor(self.values, dtype=torch.int32), device)
        )
        assert isinstance(bounds, torch.Tensor)
        return bounds

    def kept(self, name: str, make: Callable[[], object]) -> object:
        """Values that are computed from them once, for all layers."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]


DEVICES = {"cuda"}  # attention of CPUs adds in a fixed order

Heads = Sequence[torch.Tensor]  # queries, keys and values, [1, H, T, E] each


def deterministically(attend: Callable[[Heads], torch.Tensor], heads: Heads) -> torch.Tensor:
    """``attend(heads)``, forward and backward in strict mode if the run asks for deterministic
    kernels. Inside a compiled layer nothing changes: the mode is read when its graph is run."""
    is_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    applies = is_warning and torch.are_deterministic_algorithms_enabled()
    if torch.compiler.is_compiling() or not applies or heads[0].device.type not in DEVICES:
        return attend(heads)
    inside = cast("Heads", _Enter.apply(*heads))  # type: ignore[no-untyped-call]
    with _strict():
        output = attend(inside)
    return cast("torch.Tensor", _Leave.apply(output))  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _strict() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


def leave_strict_mode() -> None:
    """After a backward pass that failed inside of attention, which would have left it."""
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True, warn_only=True)


class _Enter(torch.autograd.Function):
    """The inputs; their backward pass is the last one of the attention, and leaves strict mode."""

    @staticmethod
    def forward(_ctx: Any, *heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(each.view_as(each) for each in heads)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.use_deterministic_algorithms(True, warn_only=True)
        return gradients


class _Leave(torch.autograd.Function):
    """The output; its backward pass is the first one of the attention, and enters strict mode."""

    @staticmethod
    def forward(_ctx: Any, found: torch.Tensor) -> torch.Tensor:
        return found.view_as(found)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        torch.use_deterministic_algorithms(True)
        return gradients[0]


logger = logging.getLogger(__name__)
PREFIX = "surefoot_packed_"  # of the names registered with transformers
_BY_MASK = "gets_mask_of_packed_rows"  # an attribute of such models


@dataclass(frozen=True)
class Scoring:
    """How the scores of queries and keys become weights."""

    scaling: float | None  # None: E to the power of -1/2
    dropout: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None = None  # [H] a score of each head beside those of the keys
    seen: torch.Tensor | None = None  # [queries, keys] the model's own mask; None: causal


Kernel = Callable[[Heads, Scoring], torch.Tensor]


def _mask(
    query_HTE: torch.Tensor, key_HTE: torch.Tensor, window: int | None
) -> torch.Tensor | None:
    """Boolean causal mask [queries, keys], or None if torch's own is the same. Queries are at the
    end of the keys; with a sliding window they attend only to the last keys before them."""
    count, length = query_HTE.shape[-2], key_HTE.shape[-2]
    if count == length and (window is None or length <= window):
        return None
    seen = torch.ones(count, length, dtype=torch.bool, device=query_HTE.device)
    seen = seen.tril(length - count)
    return seen if window is None else seen.triu(length - count - window + 1)


def sdpa(heads: Heads, scoring: Scoring) -> torch.Tensor:
    """One document, or the end of one, through torch's fused attention."""
    for verb, setting in (("caps", scoring.softcap), ("adds sinks to", scoring.sinks)):
        if setting is not None:
            raise ModelError(
                f"this model {verb} its attention scores, which sdpa does not support; set "
                "model.attention: eager"
            )
    query_HTE, key_HTE, value_HTE = heads
    mask = scoring.seen
    if mask is None:
        mask = _mask(query_HTE, key_HTE, scoring.window)
    return F.scaled_dot_product_attention(
        query_HTE,
        key_HTE,
        value_HTE,
        attn_mask=mask,
        dropout_p=scoring.dropout,
        is_causal=mask is None,
        scale=scoring.scaling,
        enable_gqa=query_HTE.shape[1] != key_HTE.shape[1],
    )


def _eager(heads: Heads, scoring: Scoring) -> torch.Tensor:
    """Without a fused kernel: softmax(q kᵀ · scaling) v, scores capped as tanh(s / cap) · cap."""
    query_HTE, key_HTE, value_HTE = heads
    softcap = scoring.softcap
    groups = query_HTE.shape[1] // key_HTE.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key_HTE, value_HTE))
    scale = query_HTE.shape[-1] ** -0.5 if scoring.scaling is None else scoring.scaling
    scores_HTT = query_HTE @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores_HTT = torch.tanh(scores_HTT / softcap) * softcap
    seen = _mask(query_HTE, key_HTE, scoring.window)
    if seen is None:
        seen = scores_HTT.new_ones(scores_HTT.shape[-2:], dtype=torch.bool).tril()
    scores_HTT = scores_HTT.masked_fill(~seen, torch.finfo(scores_HTT.dtype).min)
    if scoring.sinks is not None:  # one more column, whose weight goes to no value
        sinks_HT1 = scoring.sinks.view(1, -1, 1, 1).expand(*scores_HTT.shape[:-1], 1)
        scores_HTT = torch.cat([scores_HTT, sinks_HT1.to(scores_HTT.dtype)], dim=-1)
    weights = F.softmax(scores_HTT, dim=-1, dtype=torch.float32).to(query_HTE.dtype)
    weights = weights[..., : value.shape[-2]]
    return F.dropout(weights, p=scoring.dropout) @ value


class RowMask:
    """What a model's own mask of a packed row shows inside of each document.

    transformers composes masks of functions of positions in the row. Between two positions of a
    document such a function says what it would say if the document were alone: windows depend on
    distances, and the tokens of a picture, which see each other, are looked up. Only its own
    treatment of packed rows would look them up at positions inside of documents; it is not asked
    for, since these rows come with a padding mask of ones.
    """

    def __init__(self, function: Callable[..., torch.Tensor], device: torch.device) -> None:
        self._function, self._device = function, device
        self._known: dict[tuple[int, int], torch.Tensor | None] = {}

    def of(self, start: int, stop: int) -> torch.Tensor | None:
        """[n, n] the keys that each query of a document sees; None if they are those before it."""
        if (start, stop) not in self._known:
            at = torch.arange(start, stop, device=self._device)
            first = torch.zeros(1, 1, dtype=torch.int64, device=self._device)  # row and head
            seen = self._function(first, first, at[:, None], at[None]).expand(len(at), len(at))
            # of a model on the meta device only the shapes matter
            is_causal = seen.is_meta or torch.equal(seen, torch.ones_like(seen).tril())
            self._known[start, stop] = None if is_causal else seen
        return self._known[start, stop]


def _row_mask_of(
    *_: object, mask_function: Callable[..., torch.Tensor], device: torch.device, **__: object
) -> torch.Tensor:
    """A mask as transformers calls for it: a tensor with four dimensions, which models pass on
    unread (of any other object, some ask for the dimensions), and which carries a ``RowMask``."""
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
    mask.of_row = RowMask(mask_function, device)  # type: ignore[attr-defined]
    return mask


def by_document(kernel: Kernel) -> Callable[..., tuple[torch.Tensor, None]]:
    """An attention function as transformers calls it, [1, H, T, E] in and [1, T, H, E] out."""

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        bounds = kwargs.get("document_bounds")
        if not isinstance(bounds, Bounds):
            raise BoundsMissingError(
                f"data.packing: {type(module).__name__} was called without document boundaries, "
                "which this architecture does not pass to its attention; set data.packing: false"
            )
        options = cast("Mapping[str, Any]", kwargs)
        dropout, window = options.get("dropout") or 0.0, options.get("sliding_window")
        scoring = Scoring(
            options.get("scaling"), dropout, window, options.get("softcap"), options.get("s_aux")
        )
        parts = bounds.parts
        runs = [n for prompt, first, *later in parts for n in (prompt + first, *later) if n]

        def each_alone(heads: Heads) -> torch.Tensor:
            # split, not slices: the backward pass of a slice would fill a whole row with zeros
            pieces = zip(*(torch.split(t, runs, dim=2) for t in heads), strict=True)
            outputs, start = [], 0
            of_row: RowMask | None = getattr(attention_mask, "of_row", None)
            for prompt, first_length, *later in parts:
                first, stop = next(pieces), start + prompt + first_length
                seen = None if of_row is None else of_row.of(start, stop)
                own = scoring if seen is None else replace(scoring, seen=seen)
                outputs.append(kernel(first, own))
                start = stop + sum(later)
                # once: the backward pass of each slice fills all of the first part with zeros
                shared = [each.narrow(2, 0, prompt) for each in first[1:]] if any(later) else []
                responses = (next(pieces) for length in later if length)
                outputs += [kernel(_after(shared, response), scoring) for response in responses]
            return torch.cat(outputs, dim=2)

        output = deterministically(each_alone, (query, key, value))
        return output.transpose(1, 2).contiguous(), None

    return attend


def _after(shared: Heads, response: Heads) -> Heads:
    """Queries of a later response, with keys and values of the prompt, ``shared``, and its own."""
    query, *keys_values = response
    return [query, *(torch.cat(pair, dim=2) for pair in zip(shared, keys_values, strict=True))]


KERNELS: dict[str, Kernel] = {"sdpa": sdpa, "eager": _eager}
for _name, _kernel in KERNELS.items():
    # Not to be compiled: it would be compiled again for every number of documents.
    _attend = torch.compiler.disable(by_document(_kernel))  # type: ignore[no-untyped-call]
    AttentionInterface.register(PREFIX + _name, _attend)


MASKS = PREFIX + "masks"  # sdpa, with the model's own mask of each document
AttentionInterface.register(MASKS, torch.compiler.disable(by_document(sdpa)))  # type: ignore[no-untyped-call]
AttentionMaskInterface.register(MASKS, _row_mask_of)


class BoundsMissingError(ModelError):
    """Attention over packed rows was called without the bounds of their documents."""


@torch.no_grad()
def switch_to_packed(model: PreTrainedModel) -> None:
    """Make ``model`` use this module's attention for packed rows, if there is one for its kernel
    and if its layers pass the bounds of documents on, which is tried on the meta device."""
    kernel = model.config._attn_implementation
    if kernel not in KERNELS:
        return
    set_attention(model, PREFIX + kernel)
    if not uses_document_attention(model):  # it does not follow such settings
        return
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return  # its hooks would take the meta tensors for its own; the attempt with values decides
    if not _passes_bounds(model):
        set_attention(model, kernel)


@once_per_architecture
def _passes_bounds(model: PreTrainedModel) -> bool:
    """Whether the layers of ``model`` pass the bounds of documents on, as far as that is found."""
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    try:
        with on_meta(model):
            model(input_ids=ids, use_cache=False, **one_document(model, 2))
    except BoundsMissingError:
        return False
    except Exception as error:  # the attempt with values will say what is wrong, if anything is
        logger.debug("%s: not tried on the meta device: %s", type(model).__name__, error)
    return True


def attend_by_mask(model: PreTrainedModel, *, is_on: bool) -> None:
    """Whether ``model`` gets the mask of a packed row as an argument: for architectures that build
    one without looking at positions."""
    vars(model)[_BY_MASK] = is_on


def _row_mask(model: PreTrainedModel, bounds: Sequence[int]) -> torch.Tensor:
    """[1, 1, T, T] the causal mask of the documents in a row, added to the scores."""
    lengths = torch.tensor([b - a for a, b in pairwise(bounds)])
    document_T = sent(torch.repeat_interleave(lengths), model.device)
    seen_TT = (document_T[:, None] == document_T[None]).tril()
    lowest = torch.finfo(model.dtype).min
    mask_TT = torch.zeros_like(seen_TT, dtype=model.dtype).masked_fill(~seen_TT, lowest)
    return mask_TT[None, None]


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Use the attention ``name``: one of this module in the language model alone. A tower for
    pictures gets no bounds of documents, and attends in both directions."""
    text = model.config.get_text_config()
    if text is model.config or not name.startswith(PREFIX):
        model.set_attn_implementation(name)
        return
    parts = {key: getattr(model.config, key) for key in model.config.sub_configs}
    plain = _plain(name)
    model.set_attn_implementation(
        {"": name} | {key: name if part is text else plain for key, part in parts.items()}
    )


def plain_kernel(model: PreTrainedModel) -> str:
    """The attention of transformers in place of that of packed rows."""
    kernel: str = model.config._attn_implementation
    return _plain(kernel) if kernel.startswith(PREFIX) else kernel


def _plain(kernel: str) -> str:
    kernel = kernel.removeprefix(PREFIX)
    return kernel if kernel in KERNELS else "sdpa"


def follow_calls(model: PreTrainedModel) -> None:
    """Let ``model`` be called without document boundaries, too, as ``generate`` does: such a call
    has transformers' own attention, and the next one again that of packed rows."""
    before: list[str] = []

    def switch(_: nn.Module, _args: object, kwargs: Mapping[str, object]) -> None:
        before.append(model.config._attn_implementation)
        if "document_bounds" not in kwargs and uses_document_attention(model):
            set_attention(model, plain_kernel(model))

    def restore(*_: object) -> None:
        kernel = before.pop()
        if model.config._attn_implementation != kernel:
            set_attention(model, kernel)

    model.register_forward_pre_hook(switch, with_kwargs=True)
    model.register_forward_hook(restore, always_call=True)


def uses_document_attention(model: PreTrainedModel) -> bool:
    """Whether packed rows of ``model`` use the attention functions of this module."""
    kernel: str = model.config._attn_implementation
    return kernel.startswith(PREFIX)


def packed_arguments(
    model: PreTrainedModel, cu_seqlens: torch.Tensor, branches: torch.Tensor | None = None
) -> dict[str, object]:
    """The arguments of ``model`` for a packed row with these bounds and branches, on the CPU."""
    bounds = cu_seqlens.tolist()
    if uses_document_attention(model):
        parts = None if branches is None else branches.tolist()
        arguments: dict[str, object] = {"document_bounds": Bounds(bounds, parts)}
        if model.config._attn_implementation == MASKS:  # or transformers would look for documents
            ones = torch.ones(1, bounds[-1], dtype=torch.int64, device=model.device)
            arguments["attention_mask"] = ones
        return arguments
    if branches is not None:
        raise ModelError(
            f"{type(model).__name__}: responses cannot share a prompt with the attention "
            f"{model.config._attn_implementation}; set model.attention: sdpa"
        )
    if vars(model).get(_BY_MASK):
        return {"attention_mask": _row_mask(model, bounds)}
    longest = max(b - a for a, b in pairwise(bounds))
    on_device = sent(cu_seqlens, model.device)
    return {
        "cu_seq_lens_q": on_device,
        "cu_seq_lens_k": on_device,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def one_document(model: PreTrainedModel, length: int) -> dict[str, object]:
    """The arguments of ``model`` for a row that is one document."""
    if not uses_document_attention(model):
        return {}
    return packed_arguments(model, torch.tensor([0, length], dtype=torch.int32, device="cpu"))


# heads, bounds, scale of the scores (None: E to the power of -1/2): [1, T, H, E]
RowKernel = Callable[[Heads, Bounds, float | None], torch.Tensor]


def _tokens_first(heads: Heads) -> list[torch.Tensor]:
    return [each[0].transpose(0, 1) for each in heads]


def _shares_keys(heads: Heads) -> bool:
    """Whether several query heads attend to one key-value head."""
    return heads[0].shape[1] != heads[1].shape[1]


@dataclass(frozen=True)
class _Segments:
    """Runs of queries, and of the keys that each sees: causal masks are aligned at their ends."""

    queries: torch.Tensor  # [S + 1] int32, bounds
    keys: torch.Tensor  # [S + 1] int32, bounds of their keys
    longest: tuple[int, int]  # run of queries, and of keys
    tokens: torch.Tensor | None  # [K] whose keys they are; None: those of the row, in order


def _segments(bounds: Bounds, device: torch.device) -> _Segments:
    """The documents of a row; a later response is a segment that sees the prompt and itself."""
    if bounds.branches is None:
        starts, longest = bounds.on(device), bounds.longest
        return _Segments(starts, starts, (longest, longest), None)
    queries, keys, tokens = list[int](), list[int](), list[torch.Tensor]()
    for start, (prompt, first, *later) in zip(bounds.values, bounds.parts, strict=False):
        stop = start + prompt + first
        queries.append(stop - start)
        keys.append(stop - start)
        tokens.append(torch.arange(start, stop))
        for length in filter(None, later):
            queries.append(length)
            keys.append(prompt + length)
            tokens += [torch.arange(start, start + prompt), torch.arange(stop, stop + length)]
            stop += length
    of_queries, of_keys = (
        sent(torch.tensor([0, *lengths]).cumsum(0).int(), device) for lengths in (queries, keys)
    )
    longest_runs = max(queries), max(keys)
    return _Segments(of_queries, of_keys, longest_runs, sent(torch.cat(tokens), device))


def varlen(heads: Heads, bounds: Bounds, scaling: float | None) -> torch.Tensor:
    """torch's own flash attention for documents of any length."""
    device = heads[0].device
    segments = cast(_Segments, bounds.kept("segments", lambda: _segments(bounds, device)))
    if (tokens := segments.tokens) is not None:
        heads = [heads[0], *(each.index_select(2, tokens) for each in heads[1:])]
    attend = cast("Callable[..., torch.Tensor]", varlen_attn)
    shared = {"enable_gqa": _shares_keys(heads)} if _takes_enable_gqa(attend) else {}

    def rows(inside: Heads) -> torch.Tensor:
        return attend(
            *_tokens_first(inside),
            *(segments.queries, segments.keys, *segments.longest),
            scale=scaling,
            window_size=(-1, 0),
            **shared,
        )

    return deterministically(rows, heads)[None]


@cache
def _takes_enable_gqa(attend: Callable[..., torch.Tensor]) -> bool:
    """Whether shared keys need this argument; torch 2.11 infers them from shapes."""
    return "enable_gqa" in signature(attend).parameters


def flex(heads: Heads, bounds: Bounds, scaling: float | None) -> torch.Tensor:
    """torch's flex attention with a block mask that skips blocks outside of documents."""
    attend = cast("Callable[..., object]", _compiled() if heads[0].is_cuda else flex_attention)
    mask = bounds.kept("blocks", lambda: _blocks(bounds, heads[0].device))
    output = attend(*heads, block_mask=mask, scale=scaling, enable_gqa=_shares_keys(heads))
    return cast("torch.Tensor", output).transpose(1, 2)


@cache
def _compiled() -> Callable[..., object]:
    return torch.compile(flex_attention, dynamic=True)


def _blocks(bounds: Bounds, device: torch.device) -> BlockMask:
    starts, length = bounds.on(device), bounds.values[-1]
    document_T = torch.searchsorted(starts, torch.arange(length, device=device), right=True)
    parts = torch.tensor(bounds.parts, dtype=torch.int64, device="cpu")  # [D, 1 + R]
    number = torch.arange(parts.shape[1], device="cpu").expand(parts.shape)
    part_T = sent(number.flatten().repeat_interleave(parts.flatten()), device)  # 0: of the prompt

    def sees(
        _row: torch.Tensor, _head: torch.Tensor, here: torch.Tensor, there: torch.Tensor
    ) -> torch.Tensor:
        is_seen = (part_T[there] == 0) | (part_T[there] == part_T[here])
        return (here >= there) & (document_T[here] == document_T[there]) & is_seen

    return create_block_mask(sees, None, None, length, length, device=str(device))


def candidates(device: torch.device) -> dict[str, RowKernel]:
    """The kernels that may run on ``device``, by name, in order of preference.

    varlen comes first, since it is not compiled; flex knows every type and head size. torch has
    both, so a run has the same numbers whatever else is installed.
    """
    return {"varlen": varlen, "flex": flex} if device.type == "cuda" else {}


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
        if not is_plain or not isinstance(bounds, Bounds):
            return otherwise(module, query, key, value, attention_mask, **kwargs)
        scaling = cast("float | None", kwargs.get("scaling"))
        return kernel(as_computed((query, key, value)), bounds, scaling).contiguous(), None

    # as in ``packed``: not to be compiled for every number of documents
    AttentionInterface.register(PREFIX + name, torch.compiler.disable(attend))  # type: ignore[no-untyped-call]


def as_computed(heads: Heads) -> Heads:
    """The heads in the type of autocast, as it casts them for SDPA and for no other kernel: a
    rotation by float32 angles has made queries and keys float32, beside values in bfloat16."""
    kind = heads[0].device.type
    if not torch.is_autocast_enabled(kind):
        return heads
    return [each.to(torch.get_autocast_dtype(kind)) for each in heads]


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
    groups, size = size_of(config, "num_key_value_heads"), size_of(config, "head_dim")
    return Row(
        num_heads=heads,
        num_key_value_heads=groups if isinstance(groups, int) else heads,
        head_dim=size if isinstance(size, int) else config.hidden_size // heads,
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
    expected = _output_and_gradients(_by_document, row)
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
    set_attention(model, PREFIX + name)
    return name


def _by_document(heads: Heads, bounds: Bounds, scaling: float | None) -> torch.Tensor:
    settings = {"document_bounds": bounds, "scaling": scaling}
    return by_document(sdpa)(torch.nn.Identity(), *heads, None, **settings)[0]


def _output_and_gradients(kernel: RowKernel, row: Row) -> list[torch.Tensor]:
    """The output of ``kernel`` for ``row``, and the gradients of its inputs: of its documents, and
    of each as a prompt with responses."""
    results = []
    lengths = [b - a for a, b in pairwise(row.bounds)]
    branches = [(n - 3 * (n // 4), *[n // 4] * 3) for n in lengths]
    for bounds in (Bounds(row.bounds), Bounds(row.bounds, branches)):
        inputs = [tensor.requires_grad_() for tensor in row.inputs()]
        output = kernel(inputs, bounds, row.head_dim**-0.5)
        output.backward(torch.cos(output.detach()))  # type: ignore[no-untyped-call]
        gradients = [tensor.grad for tensor in inputs if tensor.grad is not None]
        results += [output.detach(), *gradients]
    return results


def _why_not(kernel: RowKernel, row: Row, expected: Sequence[torch.Tensor]) -> str | None:
    first, second = (_output_and_gradients(kernel, row) for _ in range(2))
    values = ("result", "dq", "dk", "dv")
    names = (*values, *(f"{name} of responses that share a prompt" for name in values))
    for name, here, there in zip(names, first, expected, strict=True):
        bound = 16 * torch.finfo(row.dtype).eps * float(there.abs().max())
        error = float((here.double() - there.double()).abs().max())
        if not error <= bound:
            return f"its {name} differs by {error:.2g} from that of sdpa, one call per document"
    is_same = all(map(torch.equal, first, second))
    if torch.are_deterministic_algorithms_enabled() and not is_same:
        return "its bits differ from run to run (train.deterministic)"
    return None
