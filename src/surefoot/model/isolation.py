"""Which attention computes packed rows right in an architecture: found by trying, before training.

Four ways are tried in this order, and the first one that passes is used (``settle_attention``). One
call per document sees what the architecture's own mask shows, unless a sliding window or chunks are
in the mask alone and a document is longer. Layers with a state are then called by document, too
(``packed_mixers``). For rows with pictures, whose tokens see each other in
some models, each call may have the architecture's own mask of its document. transformers' own mask
of a row tells documents apart by their positions, and costs the square of the row. Where an
architecture builds its mask without positions, the mask of the row is passed to it.

A way passes if nothing of a document depends on the one before it, and if a document in a row has
the values that it has alone, in transformers' own attention. The document is as long as the longest
one of the run, so that it exceeds every window that the run will exceed.

``network.open`` calls ``use_packed`` before weights are sharded, ``Network`` calls
``settle_attention`` where only the sharded model can be run, and evaluations ``packed_meanwhile``.
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
from ..log import fell_back
from .packed_attention import (
    KERNELS,
    MASKS,
    PREFIX,
    BoundsMissingError,
    attend_by_mask,
    by_document,
    no_parts,
    packed_arguments,
    plain_kernel,
    set_attention,
    switch_to_packed,
    uses_document_attention,
)
from .packed_mixers import has_mixers, join_mixers, separate_mixers

logger = logging.getLogger(__name__)
Run = Callable[[Batch], torch.Tensor]  # a value, or a row of them, for each trained position
_PICTURES_SEEN = "the tokens of a picture see each other"
_OF_CODE = (RuntimeError, ValueError, TypeError, IndexError, AttributeError)
_SEEN = "examples in one row would see each other"
_OTHER_VALUES = "an example in a row gets other values than alone"
# A document, and a prompt with two answers to it, which follow once with the prompt shared and once
# apart; together 24 tokens, which most numbers of processes divide that share tokens.
_FIRST, _PAIR = 4, (2, 3, 4)
_UNIT = _FIRST + 2 * sum(_PAIR) + _PAIR[0]
_LEAST, _MOST = 1024, 4096  # tokens before a document, where masks of whole rows tell them apart
_NUM_COMPARED = 8  # trained positions at the end of a long document


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
    *,
    is_stage: bool = False,
) -> bool:
    """Find the first way that computes packed rows right, and leave it in use.

    Args:
        model: what ``run`` runs, complete or a pipeline stage.
        run: computes the trained positions of a batch.
        longest: tokens of the longest document.
        agreed: makes the problem of one rank that of all.
        probes: rows with pictures, which text does not stand for: some models attend to the tokens
            of a picture in both directions.
        is_stage: other ranks have other layers, so they would not wrap the same.

    Returns whether two responses that share a prompt get the values of two documents.

    Raises:
        ModelError: no way is right: layers are recurrent, or have masks of their own.
    """

    def attempt() -> tuple[str | None, bool]:
        problem, may_share = _attempt(model, run, longest, probes)
        return agreed(problem), may_share

    plain, first_problem = plain_kernel(model), None
    if uses_document_attention(model):
        first_problem, may_share = attempt()
        if first_problem is None:
            return may_share
        if first_problem == _SEEN and not is_stage and (names := _separated(model, run)):
            problem, may_share = attempt()
            if problem is None:
                what = "%s: packed rows are computed document by document in %d layers with a state"
                logger.info(what, type(model).__name__, len(names))
                return may_share
            join_mixers(model)
        if first_problem == _PICTURES_SEEN:
            set_attention(model, MASKS)
            problem, _ = attempt()
            if problem is not None:
                raise _refused(model, problem)
            _say_masks(model, "of each document", first_problem)
            return False
        set_attention(model, plain)
        _say_masks(model, "of whole rows", first_problem)
    for is_on in (False, True):
        attend_by_mask(model, is_on=is_on)
        problem, _ = attempt()
        if problem is None:
            if first_problem is None and plain in KERNELS:
                _say_masks(model, "of whole rows", "its layers take no bounds of documents")
            return False
        first_problem = first_problem or problem
    attend_by_mask(model, is_on=False)
    raise _refused(model, first_problem)


_OF_PLACES = ("dynamic", "longrope")  # rotations of a token by how long its row is
_IN_ROWS = ("full_attention", "sliding_attention")  # layers in which a part of a row can be


def refuse_parts(model: PreTrainedModel) -> None:
    """Raise ``ModelError`` if it is known on the meta device that ranks cannot share rows of
    ``model``, which packs them."""
    config = model.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - {*_IN_ROWS}
    if others or model._is_stateful:
        kinds = f" ({', '.join(sorted(others))})" if others else ""
        raise no_parts(model, f"its layers have a state, or tables of their own{kinds}")
    if not uses_document_attention(model) or model.config._attn_implementation == MASKS:
        raise no_parts(model, "its attention is by masks of rows")
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if (kind := part.get("rope_type")) in _OF_PLACES:
            raise no_parts(model, f"its rotary embedding ({kind}) depends on the length of the row")


@torch.no_grad()
def verify_parts(
    model: PreTrainedModel,
    run: Run,
    run_part: Run,
    longest: int,
    agreed: Callable[[str | None], str | None],
) -> None:
    """Raise ``ModelError`` unless ranks that share a row get the values that one rank gets of it:
    attention may not be all by which its tokens see each other. The arguments are those of
    ``settle_attention``; ``run_part`` computes a part of the row."""
    refuse_parts(model)
    if has_mixers(model):
        raise no_parts(model, "its layers have a state")
    row = _long_probe(model, longest).together
    problem = None
    try:
        if not _have_same_values(run_part(row), run(row)):
            problem = "its tokens get other values than in a whole row"
    except torch.OutOfMemoryError:
        raise
    except _OF_CODE as error:
        problem = f"its code fails on it ({first_line(error)})"
    if problem := agreed(problem):
        raise no_parts(model, problem)


def _separated(model: PreTrainedModel, run: Run) -> list[str]:
    """The layers by which documents of a row would see each other, which compute each by itself
    from now on."""
    vocab_size = model.config.get_text_config().vocab_size

    def run_row(start: int) -> None:
        run(_short_row(vocab_size, start, shares=True))

    try:
        return separate_mixers(model, run_row, _FIRST)
    except torch.OutOfMemoryError:
        raise
    except (BoundsMissingError, *_OF_CODE):  # the attempt with whole rows will say what is wrong
        join_mixers(model)
        return []


def _say_masks(model: PreTrainedModel, of: str, problem: str) -> None:
    what = f"{type(model).__name__}: packed rows have masks {of}, and prompts are not shared"
    fell_back(what, problem, "costs memory and time by the square of their length", logging.INFO)


def _refused(model: PreTrainedModel, problem: str | None) -> ModelError:
    return ModelError(
        f"data.packing: {type(model).__name__} cannot train on packed rows: {problem}; set "
        "data.packing: false"
    )


def _attempt(
    model: PreTrainedModel, run: Run, longest: int, probes: Sequence[Probe]
) -> tuple[str | None, bool]:
    """Why the attention in use is not right for packed rows, None if it is; and whether responses
    may share prompts then."""
    try:
        return _compare(model, run, longest, probes)
    except torch.OutOfMemoryError:  # a RuntimeError that says nothing about the architecture
        raise
    except BoundsMissingError:
        return "its layers do not pass on where documents begin", False
    except _OF_CODE as error:
        return f"its code fails on them ({first_line(error)})", False


def _compare(
    model: PreTrainedModel, run: Run, longest: int, probes: Sequence[Probe]
) -> tuple[str | None, bool]:
    """The result of ``_attempt``, for a model whose code does not fail."""
    is_by_document = uses_document_attention(model)
    if is_by_document and model.config._attn_implementation != MASKS:
        # Found in the masks, and not in values: in bfloat16, in which 5 % are rounding, the
        # log-probabilities of Gemma 3 with a causal mask are 0.15 % off, and its gradients 17 %.
        documents = [batch for probe in probes for batch in probe.alone]
        if any(_hiding_layer(model, run, document) for document in documents):
            return _PICTURES_SEEN, False
    is_isolated, may_share = _isolation(model, run)
    if not is_isolated:
        return _SEEN, False
    long_probe = _long_probe(model, longest)
    if is_by_document and (layer := _hiding_layer(model, run, long_probe.alone[0])):
        return f"{layer} hides tokens by a mask of its own", False
    if not _is_as_alone(model, run, long_probe):
        return _OTHER_VALUES, False
    if not all(_is_as_alone(model, run, probe) for probe in probes):
        return f"{_OTHER_VALUES}, if it has pictures", False
    return None, may_share


def _isolation(model: PreTrainedModel, run: Run) -> tuple[bool, bool]:
    """Whether other documents get the same values when the first one changes, and whether two
    responses that share a prompt get those of two documents."""
    vocab_size, shares = model.config.get_text_config().vocab_size, uses_document_attention(model)
    logits, other = (
        run(_short_row(vocab_size, start, shares=shares)) for start in (0, vocab_size // 2)
    )
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


def _is_close(first: torch.Tensor, second: torch.Tensor, share: float) -> bool:
    """Whether two results differ only as sums in another order do, by a ``share`` of the largest:
    experts multiply as many tokens at once as are routed to them, from all documents."""
    return float((first - second).abs().max()) <= share * float(first.abs().max())


def _short_row(vocab_size: int, start: int, *, shares: bool) -> Batch:
    """A document that begins with the token ``start``; a prompt and two responses, with labels,
    that share the prompt; the same as two documents."""
    tokens = torch.arange(_FIRST + sum(_PAIR))
    first, prompt, first_response, second_response = torch.split(tokens, [_FIRST, *_PAIR])
    both = [torch.cat([prompt, first_response]), torch.cat([prompt, second_response])]
    shared = [torch.cat([prompt, first_response, second_response])] if shares else []
    documents = [first, *shared, *both]
    token = torch.cat(documents)
    ids = torch.where(token < _FIRST, token + start, token) % vocab_size
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


def _hiding_layer(model: PreTrainedModel, run: Run, document: Batch) -> str | None:
    """The first layer that hides other tokens of ``document`` than attention by document does:
    transformers builds another mask for it."""
    bounds = torch.tensor([0, document.input_ids.shape[1]], dtype=torch.int32)
    row = replace(document, attention_mask=None, cu_seqlens=bounds)
    name, hiding = model.config._attn_implementation, list[str]()
    comparing = PREFIX + "compared"
    attend = torch.compiler.disable(_comparing(name.removeprefix(PREFIX), hiding))  # type: ignore[no-untyped-call]
    AttentionInterface.register(comparing, attend)
    AttentionMaskInterface.register(comparing, AttentionMaskInterface()["sdpa"])
    set_attention(model, comparing)
    try:
        run(row)
    finally:
        set_attention(model, name)
    return hiding[0] if hiding else None


def _comparing(kernel: str, hiding: list[str]) -> Callable[..., tuple[torch.Tensor, None]]:
    """Attention by document that notes, in ``hiding``, modules which are given another mask."""
    attend = by_document(KERNELS.get(kernel, KERNELS["sdpa"]))

    def compare(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        window, length = kwargs.get("sliding_window"), query.shape[-2]
        is_cut = isinstance(window, int) and window < length
        if attention_mask is not None or is_cut:
            causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
            expected = causal.triu(1 - window) if isinstance(window, int) and is_cut else causal
            shown = causal if attention_mask is None else _shown(attention_mask)
            if shown is None or not bool((shown == expected).all()):
                hiding.append(type(module).__name__)
        return attend(module, query, key, value, None, **kwargs)

    return compare


def _shown(mask: torch.Tensor) -> torch.Tensor | None:
    """Which tokens a mask shows; None if it does more than that."""
    if mask.dtype == torch.bool:
        return mask
    is_plain = (mask == 0) | (mask <= torch.finfo(mask.dtype).min / 2)
    return mask == 0 if bool(is_plain.all()) else None


def _long_probe(model: PreTrainedModel, longest: int) -> Probe:
    """A document of about ``longest`` tokens behind others in a row, and alone; its last positions
    are trained."""
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    max_positions = positions if isinstance(positions, int) else None
    num_units = max(2, -(-longest // _UNIT))
    if max_positions is not None:  # also of the row, for a model that counts its tokens
        num_units = max(1, min(num_units, max_positions // _UNIT - 1))
    preceding = [_UNIT]
    if not uses_document_attention(model):
        # masks of an architecture may end where its positions do; distances in bfloat16 are exact
        # up to 256 columns only (ALiBi of Falcon in transformers 5.24)
        num_before = min(max(max_positions or 0, _LEAST), _MOST)
        # several, if it has fewer positions: GPT-J looks up each in a table
        longest_before = min(max_positions or num_before, num_before)
        preceding = [longest_before] * -(-num_before // longest_before)
    document = _long_row([num_units * _UNIT], config.vocab_size)
    row = _long_row([*preceding, num_units * _UNIT], config.vocab_size)
    return Probe(row, [replace(document, cu_seqlens=None)])


def _long_row(lengths: Sequence[int], vocab_size: int) -> Batch:
    """Documents of these lengths, the end of the last one trained. Their tokens look random, and
    are the same every time."""
    positions = [torch.arange(length) for length in lengths]
    ids = torch.cat([(n * n * 31 + n * 17 + len(n)) % vocab_size for n in positions])
    labels = torch.full_like(ids, IGNORE_INDEX)
    labels[-_NUM_COMPARED:] = ids[-_NUM_COMPARED:]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return Batch(ids[None], labels[None], torch.cat(positions)[None], cu_seqlens=bounds)


def _is_as_alone(model: PreTrainedModel, run: Run, probe: Probe) -> bool:
    """Whether documents in a row have the values that they have alone, but for rounding."""
    together = run(probe.together)
    with unpacked(model):
        alone = torch.cat([run(document) for document in probe.alone])
    return _have_same_values(together, alone)


def _have_same_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether trained positions have the same values, but for rounding."""
    error = (first - second).abs().double().view(len(second), -1).amax(1)
    largest, rounding = float(second.abs().max()), torch.finfo(second.dtype).eps
    # in few bits, experts of some tokens are chosen by rounding: most positions must agree
    worst = error.max() if rounding < 1e-6 else error.median()
    return float(worst) <= min(512 * rounding, 0.05) * largest


def _trained_logits(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    on_device = batch.to(model.device)
    assert on_device.at is not None
    bounds = on_device.cu_seqlens
    logits: torch.Tensor = model(
        **{
            "input_ids": on_device.input_ids,
            "position_ids": on_device.position_ids if on_device.axes is None else on_device.axes,
            "use_cache": False,
            **on_device.media,
            **({} if bounds is None else packed_arguments(model, bounds, on_device.branches)),
        }
    ).logits
    return logits[0, on_device.at.columns]
