"""Attention over packed rows: several documents in one row, each attending only to itself.

A dense block-diagonal mask over a row of T tokens costs T² work, while the documents need only the
sum of T_i². Measured here, one call per document on slices is 1.7 times as fast as the mask. So
packed rows run through attention functions of this module, which are registered with transformers
under names that begin with ``PREFIX``. transformers builds no mask for an attention without a mask
function of its own (5.23, ``masking_utils.py:841``). Padded batches and generation use
transformers' own functions.

``isolation`` calls ``switch_to_packed`` once, and then tries whether documents are really isolated.
Each forward pass gets ``packed_arguments``. On a GPU, ``packed_kernels`` may replace the calls per
document by one kernel.

Shapes: H heads, T tokens of the row, E size of a head.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, repeat
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..batch import RowPart, sent
from ..errors import ModelError
from ..parallel.progress import wait_for_ranks
from .loading import on_meta, once_per_architecture
from .numerics import deterministically

logger = logging.getLogger(__name__)
PREFIX = "surefoot_packed_"  # of the names registered with transformers
MASKS = PREFIX + "masks"  # sdpa, with the model's own mask of each document
_GETS_ROW_MASK = "gets_mask_of_packed_rows"  # an attribute of such models

Heads = Sequence[torch.Tensor]  # queries, keys and values, [1, H, T, E] each
Value = TypeVar("Value")


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
        logger.debug("%s: nothing is known before it has values: %s", type(model).__name__, error)
    return True


def packed_arguments(
    model: PreTrainedModel,
    cu_seqlens: torch.Tensor,
    branches: torch.Tensor | None = None,
    part: RowPart | None = None,
) -> dict[str, object]:
    """The arguments of ``model`` for a packed row with these bounds and branches, on the CPU, or
    for the ``part`` of it that is on this rank.

    There are three ways, of which ``isolation`` has selected one: the attention of this module, a
    mask of the row, or transformers' own treatment of rows whose positions restart.
    """
    bounds = cu_seqlens.tolist()
    if uses_document_attention(model):
        lengths = None if branches is None else branches.tolist()
        arguments: dict[str, object] = {"document_bounds": DocumentBounds(bounds, lengths, part)}
        if model.config._attn_implementation == MASKS:
            if part is not None:
                raise no_parts(model, "its attention has masks of whole documents")
            # Without a padding mask, transformers looks for documents in the positions itself, and
            # looks up pictures at positions inside of them (5.23, masking_utils.py:876 and 203).
            ones = torch.ones(1, bounds[-1], dtype=torch.int64, device=model.device)
            arguments["attention_mask"] = ones
        return arguments
    if part is not None:
        raise no_parts(model, f"its attention is {model.config._attn_implementation}")
    if branches is not None:
        raise ModelError(
            f"{type(model).__name__}: responses cannot share a prompt with the attention "
            f"{model.config._attn_implementation}; set model.attention: sdpa"
        )
    if vars(model).get(_GETS_ROW_MASK):
        return {"attention_mask": _additive_row_mask(model, bounds)}
    longest = max(stop - start for start, stop in pairwise(bounds))
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


class DocumentBounds:
    """The document boundaries of a row: ``values`` [documents + 1], from 0 to T.

    A compiled layer passes this object on without reading it; for a list, it would be compiled
    again for each length.

    ``branches`` are the tokens of the prompt and of each response in each document, if some share a
    prompt (see ``Batch``). ``part`` is this rank's, if several share the row.
    """

    def __init__(
        self,
        values: Sequence[int],
        branches: Sequence[Sequence[int]] | None = None,
        part: RowPart | None = None,
    ) -> None:
        self.values, self.branches, self.part = values, branches, part
        self._memo: dict[str, object] = {}

    @property
    def documents(self) -> Sequence[Sequence[int]]:
        """For each document, the tokens of the prompt and of each response, 0 of a response that is
        absent; a document without branches is all prompt."""
        return self.branches or [(stop - start, 0) for start, stop in pairwise(self.values)]

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(stop - start for start, stop in pairwise(self.values))

    def on(self, device: torch.device) -> torch.Tensor:
        """[documents + 1] the bounds as int32 on ``device``."""
        return self.memoized(
            "bounds", lambda: sent(torch.tensor(self.values, dtype=torch.int32), device)
        )

    def memoized(self, name: str, compute: Callable[[], Value]) -> Value:
        """A value that the first layer computes from the bounds, for all layers."""
        if name not in self._memo:
            self._memo[name] = compute()
        return cast("Value", self._memo[name])


def no_parts(model: PreTrainedModel, why: str) -> ModelError:
    """The error for a model of whose rows no rank can compute a part."""
    return ModelError(
        f"parallel.cp: {type(model).__name__} cannot compute a part of a row, because {why}; leave "
        "cp at 1"
    )


class BoundsMissingError(ModelError):
    """Attention over packed rows was called without the bounds of their documents."""


@dataclass(frozen=True)
class Scoring:
    """How the scores of queries and keys become weights."""

    scaling: float | None  # None: E to the power of -1/2
    dropout: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None = None  # [H] a score of each head beside those of the keys
    mask: torch.Tensor | None = None  # [queries, keys] True: is attended to; None: causal


Kernel = Callable[[Heads, Scoring], torch.Tensor]  # [1, H, queries, E] for one document


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
        if not isinstance(bounds, DocumentBounds):
            raise BoundsMissingError(
                f"data.packing: {type(module).__name__} was called without document boundaries, "
                "which this architecture does not pass to its attention; set data.packing: false"
            )
        options = cast("Mapping[str, Any]", kwargs)
        scoring = Scoring(
            scaling=options.get("scaling"),
            dropout=options.get("dropout") or 0.0,
            window=options.get("sliding_window"),
            softcap=options.get("softcap"),
            sinks=options.get("s_aux"),
        )
        row_mask: RowMask | None = getattr(attention_mask, "of_row", None)
        heads: Heads = with_fetched((query, key, value), bounds, scoring.window)

        def attend_row(heads: Heads) -> torch.Tensor:
            if bounds.part is not None:
                return _attend_runs(kernel, heads, bounds.part, scoring)
            return _attend_documents(kernel, heads, bounds, scoring, row_mask)

        output = deterministically(attend_row, heads)
        return output.transpose(1, 2).contiguous(), None

    return attend


def with_fetched(heads: Heads, bounds: DocumentBounds, window: int | None = None) -> Heads:
    """``heads``, or for a part of a row its queries and the keys and values that they attend to,
    run after run."""
    if bounds.part is None:
        return heads
    return [heads[0], *bounds.part.fetched(heads[1:], window)]


def _attend_runs(kernel: Kernel, heads: Heads, part: RowPart, scoring: Scoring) -> torch.Tensor:
    """[1, H, L, E] one call of ``kernel`` per run of queries, which are the last of their keys."""
    num_queries, num_keys = map(list, part.runs(scoring.window))
    lengths = (num_queries, num_keys, num_keys)
    runs = zip(
        *(torch.split(head, n, dim=2) for head, n in zip(heads, lengths, strict=True)), strict=True
    )
    return torch.cat([kernel(run, scoring) for run in runs], dim=2)


def _attend_documents(
    kernel: Kernel,
    heads: Heads,
    bounds: DocumentBounds,
    scoring: Scoring,
    row_mask: RowMask | None,
) -> torch.Tensor:
    """[1, H, T, E] one call of ``kernel`` per document, and one more per later response.

    A prompt and its first response are a causal sequence. A later response attends to the prompt,
    whose keys and values are computed once, and to itself.
    """
    chunk_lengths = [
        length
        for prompt, first_response, *later_responses in bounds.documents
        for length in (prompt + first_response, *later_responses)
        if length
    ]
    # split, not slices: the backward pass of a slice would fill a whole row with zeros
    chunks = zip(*(torch.split(tensor, chunk_lengths, dim=2) for tensor in heads), strict=True)
    masks = repeat(None) if row_mask is None else row_mask.of_documents(bounds)
    outputs = []
    for (prompt, _, *later_responses), mask in zip(bounds.documents, masks, strict=False):
        chunk = next(chunks)
        outputs.append(kernel(chunk, scoring if mask is None else replace(scoring, mask=mask)))
        if not any(later_responses):
            continue
        # once, not per response: the backward pass of each fills the chunk with zeros
        prompt_key, prompt_value = (tensor.narrow(2, 0, prompt) for tensor in chunk[1:])
        for _ in filter(None, later_responses):
            query, key, value = next(chunks)
            key, value = torch.cat([prompt_key, key], 2), torch.cat([prompt_value, value], 2)
            outputs.append(kernel((query, key, value), scoring))
    return torch.cat(outputs, dim=2)


def sdpa(heads: Heads, scoring: Scoring) -> torch.Tensor:
    """One document, or the end of one, through torch's fused attention."""
    if scoring.softcap is not None or scoring.sinks is not None:
        verb = "adds sinks to" if scoring.softcap is None else "caps"
        raise ModelError(
            f"this model {verb} its attention scores, which sdpa does not support; set "
            "model.attention: eager"
        )
    query, key, value = heads
    mask = _causal_mask(query, key, scoring.window) if scoring.mask is None else scoring.mask
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=scoring.dropout,
        is_causal=mask is None,
        scale=scoring.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _eager(heads: Heads, scoring: Scoring) -> torch.Tensor:
    """Without a fused kernel: softmax(q kᵀ · scaling) v, scores capped as tanh(s / cap) · cap.

    Shapes: Q queries and K keys of a document, K ≥ Q; S = K, or K + 1 with sinks.
    """
    query_HQE, key, value = heads
    num_groups = query_HQE.shape[1] // key.shape[1]
    key_HKE, value_HKE = (tensor.repeat_interleave(num_groups, dim=1) for tensor in (key, value))
    scaling = query_HQE.shape[-1] ** -0.5 if scoring.scaling is None else scoring.scaling
    scores_HQS = query_HQE @ key_HKE.transpose(-1, -2) * scaling
    if scoring.softcap is not None:
        scores_HQS = torch.tanh(scores_HQS / scoring.softcap) * scoring.softcap
    mask_QK = _causal_mask(query_HQE, key_HKE, scoring.window)
    if mask_QK is None:
        mask_QK = scores_HQS.new_ones(scores_HQS.shape[-2:], dtype=torch.bool).tril()
    scores_HQS = scores_HQS.masked_fill(~mask_QK, torch.finfo(scores_HQS.dtype).min)
    if scoring.sinks is not None:  # one more column, whose weight goes to no value
        sinks_HQ1 = scoring.sinks.view(1, -1, 1, 1).expand(*scores_HQS.shape[:-1], 1)
        scores_HQS = torch.cat([scores_HQS, sinks_HQ1.to(scores_HQS.dtype)], dim=-1)
    weights_HQS = F.softmax(scores_HQS, dim=-1, dtype=torch.float32).to(query_HQE.dtype)
    weights_HQK = weights_HQS[..., : value_HKE.shape[-2]]
    return F.dropout(weights_HQK, p=scoring.dropout) @ value_HKE


def _causal_mask(query: torch.Tensor, key: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """Boolean causal mask [queries, keys], or None if torch's own is the same. Queries are at the
    end of the keys; with a sliding window they attend only to the last keys before them."""
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    if num_queries == num_keys and (window is None or num_keys <= window):
        return None
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
    offset = num_keys - num_queries
    mask = mask.tril(offset)
    return mask if window is None else mask.triu(offset - window + 1)


KERNELS: dict[str, Kernel] = {"sdpa": sdpa, "eager": _eager}


class RowMask:
    """What a model's own mask of a packed row shows inside of each document, for ``MASKS``.

    transformers composes masks of functions of positions in the row. Between two positions of a
    document such a function returns what it would return if the document were alone: windows depend
    on distances, and the tokens of a picture, which see each other, are looked up.
    """

    def __init__(self, function: Callable[..., torch.Tensor], device: torch.device) -> None:
        self._function, self._device = function, device
        self._masks: list[torch.Tensor | None] | None = None  # of the row's documents

    def of_documents(self, bounds: DocumentBounds) -> list[torch.Tensor | None]:
        """[n, n] of each document, its first response with it: the keys that each query attends to;
        None if they are those before it."""
        if self._masks is None:  # all layers of a type have this mask
            lengths = [prompt + response for prompt, response, *_ in bounds.documents]
            starts = bounds.values[:-1]
            masks = [self._mask(start, n) for start, n in zip(starts, lengths, strict=True)]
            are_causal = [(mask == torch.ones_like(mask).tril()).all() for mask in masks]
            # One wait for the device, not one for each document; of a model on the meta device
            # only the shapes matter.
            is_meta = self._device.type == "meta"
            flags = (
                [True] * len(masks) if is_meta else wait_for_ranks(torch.stack(are_causal).tolist)
            )
            pairs = zip(masks, flags, strict=True)
            self._masks = [None if is_causal else mask for mask, is_causal in pairs]
        return self._masks

    def _mask(self, start: int, length: int) -> torch.Tensor:
        positions = torch.arange(start, start + length, device=self._device)
        first = torch.zeros(1, 1, dtype=torch.int64, device=self._device)  # row and head
        mask = self._function(first, first, positions[:, None], positions[None])
        return mask.expand(len(positions), len(positions))


def _mask_with_row(
    *_: object, mask_function: Callable[..., torch.Tensor], device: torch.device, **__: object
) -> torch.Tensor:
    """A mask as transformers calls for it, which carries a ``RowMask``. It is a tensor with four
    dimensions, since models such as BLOOM and GPT-2 pass on only these unread (5.23,
    ``modeling_gpt2.py:578``)."""
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
    mask.of_row = RowMask(mask_function, device)  # type: ignore[attr-defined]
    return mask


def register_attention(name: str, attend: Callable[..., tuple[torch.Tensor, None]]) -> None:
    """Register ``attend`` with transformers as ``name``. torch does not compile it, since it would
    be compiled again for every number of documents."""
    AttentionInterface.register(name, torch.compiler.disable(attend))  # type: ignore[no-untyped-call]


for _name, _kernel in KERNELS.items():
    register_attention(PREFIX + _name, by_document(_kernel))
register_attention(MASKS, by_document(sdpa))
AttentionMaskInterface.register(MASKS, _mask_with_row)


def attend_by_mask(model: PreTrainedModel, *, is_on: bool) -> None:
    """Whether ``model`` gets the mask of a packed row as an argument: for architectures that build
    one without looking at positions."""
    vars(model)[_GETS_ROW_MASK] = is_on


def _additive_row_mask(model: PreTrainedModel, bounds: Sequence[int]) -> torch.Tensor:
    """[1, 1, T, T] the causal mask of the documents in a row, added to the scores."""
    lengths = torch.tensor([stop - start for start, stop in pairwise(bounds)])
    document_T = sent(torch.repeat_interleave(lengths), model.device)
    is_attended_TT = (document_T[:, None] == document_T[None]).tril()
    lowest = torch.finfo(model.dtype).min
    mask_TT = torch.zeros_like(is_attended_TT, dtype=model.dtype).masked_fill(
        ~is_attended_TT, lowest
    )
    return mask_TT[None, None]


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Use the attention ``name``: one of this module in the language model alone. A tower for
    pictures gets no bounds of documents, and attends in both directions."""
    text_config = model.config.get_text_config()
    if text_config is model.config or not name.startswith(PREFIX):
        model.set_attn_implementation(name)
        return
    sub_configs = {key: getattr(model.config, key) for key in model.config.sub_configs}
    plain = _plain(name)
    names = {key: name if sub is text_config else plain for key, sub in sub_configs.items()}
    model.set_attn_implementation({"": name} | names)


def uses_document_attention(model: PreTrainedModel) -> bool:
    """Whether packed rows of ``model`` use the attention functions of this module."""
    kernel: str = model.config._attn_implementation
    return kernel.startswith(PREFIX)


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
    kernels_before: list[str] = []

    def switch(_: nn.Module, _args: object, kwargs: Mapping[str, object]) -> None:
        kernels_before.append(model.config._attn_implementation)
        if "document_bounds" not in kwargs and uses_document_attention(model):
            set_attention(model, plain_kernel(model))

    def restore(*_: object) -> None:
        kernel = kernels_before.pop()
        if model.config._attn_implementation != kernel:
            set_attention(model, kernel)

    model.register_forward_pre_hook(switch, with_kwargs=True)
    model.register_forward_hook(restore, always_call=True)
