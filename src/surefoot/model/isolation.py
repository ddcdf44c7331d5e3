"""Which attention computes packed rows right in an architecture: found by trying, before training.

Four ways are tried in this order, and the first one that passes is used. One call per document
sees what the architecture's own mask shows, unless a sliding window or chunks are in the mask alone
and a document is longer. For rows with pictures, whose tokens see each other in some models, each
call may have the architecture's own mask of its document. transformers' own mask of a row tells
documents apart by their positions, and costs the square of the row. Where an architecture builds
its mask without positions, the mask of the row is passed to it.

A way passes if nothing of a document depends on the one before it, and if a document in a row has
the values that it has alone, in transformers' own attention. The document is as long as the longest
one of the run, so that it exceeds every window that the run will exceed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..batch import IGNORE_INDEX, Batch, Probe
from ..errors import ModelError, first_line
from .packed_attention import (
    KERNELS,
    MASKS,
    PREFIX,
    BoundsMissingError,
    attend_by_mask,
    by_document,
    packed_arguments,
    plain_kernel,
    set_attention,
    switch_to_packed,
    uses_document_attention,
)

logger = logging.getLogger(__name__)
Run = Callable[[Batch], torch.Tensor]  # a value, or a row of them, for each trained position
# A document, and a prompt with two answers to it, which follow once with the prompt shared and once
# apart; together 24 tokens, which most numbers of processes divide that share tokens.
_FIRST, _PAIR = 4, (2, 3, 4)
_UNIT = _FIRST + 2 * sum(_PAIR) + _PAIR[0]
_LEAST, _MOST = 1024, 4096  # tokens before it, where masks of whole rows tell documents apart
PICTURES_SEEN = "the tokens of a picture see each other"
OTHER_VALUES = "an example in a row gets other values than alone"
_SEEN = 8  # trained positions at the end of a long document


@dataclass
class PromptSharing:
    """Whether two responses may share a prompt in the rows of a model: only after a check."""

    is_proven: bool = False


def select_prompt_sharing(
    sharing: PromptSharing, model: PreTrainedModel, was_proven: bool | None
) -> bool:
    """Whether packed rows of ``model`` share prompts: as the check says, which depends on rounding,
    at least for experts; so a resumed run keeps what ``was_proven``."""
    if was_proven is not None and uses_document_attention(model):
        sharing.is_proven = was_proven
    return sharing.is_proven


def use_packed(model: PreTrainedModel, longest: int = 0, probes: Sequence[Probe] = ()) -> bool:
    """Switch ``model`` to an attention that is right for packed rows with documents of up to
    ``longest`` tokens, and for ``probes``. Returns whether two responses may share a prompt. Raises
    ``ModelError``: no attention is right in this architecture."""
    switch_to_packed(model)
    was_training = model.training
    model.eval()
    try:
        return settle_attention(model, partial(_trained_logits, model), longest, probes=probes)
    finally:
        model.train(was_training)


@contextmanager
def packed_meanwhile(
    model: PreTrainedModel, longest: int = 0, probes: Sequence[Probe] = ()
) -> Iterator[bool]:
    """``use_packed``, undone afterwards."""
    before = model.config._attn_implementation
    try:
        yield use_packed(model, longest, probes)
    finally:
        set_attention(model, before)
        attend_by_mask(model, is_on=False)


@contextmanager
def unpacked(model: PreTrainedModel) -> Iterator[None]:
    """transformers' own attention meanwhile: packed rows have no key-value cache."""
    before = model.config._attn_implementation
    if before.startswith(PREFIX):
        set_attention(model, plain_kernel(model))
    try:
        yield
    finally:
        if model.config._attn_implementation != before:
            set_attention(model, before)


@torch.no_grad()
def settle_attention(
    model: PreTrainedModel,
    run: Run,
    longest: int = 0,
    agreed: Callable[[str | None], str | None] = lambda problem: problem,
    probes: Sequence[Probe] = (),
) -> bool:
    """Find the first way that computes packed rows right, and leave it in use.

    Args:
        model: what ``run`` runs, complete or a pipeline stage.
        run: computes the trained positions of a batch.
        longest: tokens of the longest document.
        agreed: makes the problem of one rank that of all.
        probes: rows with pictures, which text does not stand for: some models attend to the tokens
            of a picture in both directions.

    Returns whether two responses that share a prompt get the values of two documents.

    Raises:
        ModelError: no way is right: layers are recurrent, or have masks of their own.
    """
    plain, first = plain_kernel(model), None
    if uses_document_attention(model):
        local_problem, may_share = _attempt(model, run, longest, probes)
        if (first := agreed(local_problem)) is None:
            return may_share
        if first == PICTURES_SEEN:
            set_attention(model, MASKS)
            if (problem := agreed(_attempt(model, run, longest, probes)[0])) is not None:
                raise _refused(model, problem)
            logger.info("packed attention: the model's own mask of each document: %s", first)
            return False
        set_attention(model, plain)
        logger.info("packed attention: masks of whole rows: %s", first)
    for is_on in (False, True):
        attend_by_mask(model, is_on=is_on)
        if (problem := agreed(_attempt(model, run, longest, probes)[0])) is None:
            return False
        first = first or problem
    attend_by_mask(model, is_on=False)
    raise _refused(model, first)


def _refused(model: PreTrainedModel, problem: str | None) -> ModelError:
    return ModelError(
        f"data.packing: {type(model).__name__} cannot train on packed rows: {problem}; set "
        "data.packing: false"
    )


def _attempt(
    model: PreTrainedModel, run: Run, longest: int, probes: Sequence[Probe]
) -> tuple[str | None, bool]:
    """Why the attention in use is not right for packed rows, None if it is; and whether responses
    may share prompts."""
    may_share = False
    try:
        by_documents, kernel = uses_document_attention(model), model.config._attn_implementation
        # Found in the masks, and not in values: in bfloat16, in which 5 % are rounding, the
        # log-probabilities of Gemma 3 with a causal mask are 0.15 % off, and its gradients 17 %.
        rows = [_bounded(batch) for probe in probes for batch in probe.alone]
        if by_documents and kernel != MASKS and any(_other_mask(model, run, row) for row in rows):
            return PICTURES_SEEN, False
        is_isolated, may_share = _isolation(model, run)
        problem = None if is_isolated else "examples in one row would see each other"
        if problem is None and by_documents:
            problem = _other_mask(
                model, run, _long_row(model, longest, is_alone=True, is_bounded=True)
            )
        if problem is None and not _is_as_alone(model, run, longest):
            problem = OTHER_VALUES
        if problem is None and not all(_is_probe_as_alone(model, run, probe) for probe in probes):
            problem = f"{OTHER_VALUES}, if it has pictures"
    except torch.OutOfMemoryError:
        raise
    except BoundsMissingError:
        problem = "its layers do not pass on where documents begin"
    except ModelError:  # what an attention cannot do, and the setting that helps
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        problem = f"its code fails on them ({first_line(error)})"
    return problem, may_share


def _isolation(model: PreTrainedModel, run: Run) -> tuple[bool, bool]:
    """Whether other documents get the same values when the first one changes, and whether two
    responses that share a prompt get those of two documents."""
    vocabulary, shares = model.config.get_text_config().vocab_size, uses_document_attention(model)
    logits, other = (run(_row(vocabulary, start, shares=shares)) for start in (0, vocabulary // 2))
    if not bool(logits.isfinite().all()):
        raise ModelError(
            "the model computes NaN or infinite values: its weights have diverged, or overflow in "
            "model.dtype; resume from an earlier checkpoint (checkpoint.resume), or start again "
            "with a lower learning rate or another model.dtype"
        )
    rounding = torch.finfo(logits.dtype).eps
    is_isolated = _is_close(logits, other, min(32 * rounding, 0.03))
    # sums of another length may round otherwise; other positions alone give some 30,000 roundings
    shared, apart = logits.tensor_split(2)
    return is_isolated, shares and _is_close(shared, apart, min(256 * rounding, 0.03))


def _bounded(batch: Batch) -> Batch:
    """A row of one document as a packed row."""
    bounds = torch.tensor([0, batch.input_ids.shape[1]], dtype=torch.int32)
    return replace(batch, attention_mask=None, cu_seqlens=bounds)


def _other_mask(model: PreTrainedModel, run: Run, row: Batch) -> str | None:
    """What hides other tokens than attention by document does: the first layer for which
    transformers builds another mask of ``row``, which is one document."""
    name, other = model.config._attn_implementation, list[str]()
    compared = PREFIX + "compared"
    attend = torch.compiler.disable(_comparing(name.removeprefix(PREFIX), other))  # type: ignore[no-untyped-call]
    AttentionInterface.register(compared, attend)
    AttentionMaskInterface.register(compared, AttentionMaskInterface()["sdpa"])
    set_attention(model, compared)
    try:
        run(row)
    finally:
        set_attention(model, name)
    return f"{other[0]} hides tokens by a mask of its own" if other else None


def _comparing(kernel: str, other: list[str]) -> Callable[..., tuple[torch.Tensor, None]]:
    """Attention by document that notes, in ``other``, modules which are given another mask."""
    attend = by_document(KERNELS.get(kernel, KERNELS["sdpa"]))

    def compare(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        window = kwargs.get("sliding_window")
        length = query.shape[-2]
        is_cut = isinstance(window, int) and window < length
        if attention_mask is not None or is_cut:
            seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
            ours = seen.triu(1 - window) if isinstance(window, int) and is_cut else seen
            theirs = seen if attention_mask is None else _seen(attention_mask)
            if theirs is None or not bool((theirs == ours).all()):
                other.append(type(module).__name__)
        return attend(module, query, key, value, None, **kwargs)

    return compare


def _seen(mask: torch.Tensor) -> torch.Tensor | None:
    """Which tokens a mask shows; None if it does more than that."""
    if mask.dtype == torch.bool:
        return mask
    is_plain = (mask == 0) | (mask <= torch.finfo(mask.dtype).min / 2)
    return mask == 0 if bool(is_plain.all()) else None


def _is_as_alone(model: PreTrainedModel, run: Run, longest: int) -> bool:
    """Whether the second document of a row has the values that it has alone."""
    together = run(_long_row(model, longest, is_alone=False, is_bounded=True))
    with unpacked(model):
        alone = run(_long_row(model, longest, is_alone=True, is_bounded=False))
    return _agree(together, alone)


def _is_probe_as_alone(model: PreTrainedModel, run: Run, probe: Probe) -> bool:
    """Whether documents in one row have the values that they have alone."""
    together = run(probe.together)
    with unpacked(model):
        alone = torch.cat([run(batch) for batch in probe.alone])
    return _agree(together, alone)


def _agree(together: torch.Tensor, alone: torch.Tensor) -> bool:
    """Whether values in a row differ from those of documents alone only by rounding."""
    error = (together - alone).abs().double().view(len(alone), -1).amax(1)
    largest, rounding = float(alone.abs().max()), torch.finfo(alone.dtype).eps
    # in few bits, experts of some tokens are chosen by rounding: most positions must agree
    worst = error.max() if rounding < 1e-6 else error.median()
    return float(worst) <= min(512 * rounding, 0.05) * largest


def _long_row(model: PreTrainedModel, longest: int, *, is_alone: bool, is_bounded: bool) -> Batch:
    """A long document, alone or behind others; its last positions are trained. Its tokens look
    random, and are the same every time."""
    config = model.config.get_text_config()
    units = max(2, -(-longest // _UNIT))
    most = getattr(config, "max_position_embeddings", None)
    if isinstance(most, int):  # also of the row, for a model that counts its tokens
        units = max(1, min(units, most // _UNIT - 1))
    lengths = [units * _UNIT] if is_alone else [_UNIT, units * _UNIT]
    if not is_alone and not uses_document_attention(model):
        # masks of an architecture may end where its positions do; distances in bfloat16 are exact
        # up to 256 columns only (ALiBi of Falcon in transformers 5.24)
        before = min(max(most if isinstance(most, int) else 0, _LEAST), _MOST)
        # several, if it has fewer positions: GPT-J looks up each in a table
        longest_before = min(most if isinstance(most, int) else before, before)
        lengths[:1] = [longest_before] * -(-before // longest_before)
    parts = [torch.arange(n) for n in lengths]
    ids = torch.cat([(n * n * 31 + n * 17 + len(n)) % config.vocab_size for n in parts])
    labels = torch.full_like(ids, IGNORE_INDEX)
    labels[-_SEEN:] = ids[-_SEEN:]
    return Batch(
        ids[None],
        labels[None],
        torch.cat(parts)[None],
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int() if is_bounded else None,
    )


def _row(vocabulary: int, start: int, *, shares: bool) -> Batch:
    """A document that begins with the token ``start``; a prompt and two responses, with labels,
    that share the prompt; the same as two documents."""
    tokens = torch.arange(_FIRST + sum(_PAIR))
    first, prompt, first_response, second_response = torch.split(tokens, [_FIRST, *_PAIR])
    both = [torch.cat([prompt, first_response]), torch.cat([prompt, second_response])]
    shared = [torch.cat([prompt, first_response, second_response])] if shares else []
    documents = [first, *shared, *both]
    token = torch.cat(documents)
    ids = torch.where(token < _FIRST, token + start, token) % vocabulary
    positions = (
        token - _FIRST * (token >= _FIRST) - len(first_response) * (token >= second_response[0])
    )
    lengths = torch.tensor([0, *map(len, documents)])
    branches = torch.tensor([(_FIRST, 0, 0), _PAIR, *((len(d), 0, 0) for d in both)])
    return Batch(
        ids[None],
        torch.where(token < first_response[0], IGNORE_INDEX, ids)[None],
        positions[None],
        cu_seqlens=lengths.cumsum(0).int(),
        branches=branches.int() if shares else None,
    )


def _trained_logits(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    here = batch.to(model.device)
    assert here.at is not None
    bounds = here.cu_seqlens
    logits: torch.Tensor = model(
        **{
            "input_ids": here.input_ids,
            "position_ids": here.position_ids if here.axes is None else here.axes,
            "use_cache": False,
            **here.media,
            **({} if bounds is None else packed_arguments(model, bounds, here.branches)),
        }
    ).logits
    return logits[0, here.at.columns]


def _is_close(first: torch.Tensor, second: torch.Tensor, share: float) -> bool:
    """Whether two results differ only as sums in another order do, by a ``share`` of the largest:
    experts multiply as many tokens at once as are routed to them, from all documents."""
    return float((first - second).abs().max()) <= share * float(first.abs().max())
