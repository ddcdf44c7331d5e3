"""Generation by transformers, for models whose keys and values cannot be kept in slots.

Prompts of equal length share a batch, so that none is padded: padding may enter the state of a
recurrent model. Prompts with pictures are padded on the left, if a trial of the first ones has
shown that their logits stay the same. Tokens are chosen as in slots: transformers only computes the
logits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from ..log import fell_back
from ._slots import inner_model
from .responses import Finished, OnToken, OpenResponse, Request, TokenChooser, agree

logger = logging.getLogger(__name__)
_TRIED = "has_independent_rows"  # attributes of models that have been tried
_TRIED_PICTURES = "has_independent_pictures"
_COLUMNS = 3  # of padding in a trial, for prompts of equal length


def run(
    model: nn.Module,
    requests: Sequence[Request],
    chooser: TokenChooser,
    *,
    batch_size: int,
    on_token: OnToken | None = None,
) -> Iterator[Finished]:
    """The samples of ``requests``, one batch after another: all have pictures, or none has."""
    stops = sorted(chooser.stops)
    is_alone = batch_size == 1 or len(requests) < 2 or not _may_share(model, requests)
    for batch in _batches(requests, 1 if is_alone else batch_size):
        rows = [chooser.opened(request) for request in batch]
        _generate(
            model,
            **_inputs(model, batch),
            max_new_tokens=batch[0].most,
            eos_token_id=stops or None,
            pad_token_id=stops[0] if stops else 0,  # unused, after a response
            logits_processor=LogitsProcessorList([_Chosen(chooser, rows, on_token)]),
            stopping_criteria=StoppingCriteriaList([_Ended(rows)]),
        )
        yield from ((row.request, row.sample) for row in rows)


def _batches(requests: Sequence[Request], size: int) -> Iterator[list[Request]]:
    """Requests that share a batch: equal remaining context, and equal lengths of those without
    pictures."""

    def shape(request: Request) -> tuple[int, int]:
        return request.most, len(request.prompt)

    def batched(request: Request) -> tuple[int, int]:
        return request.most, len(request.prompt) if request.pictures is None else 0

    for _, group in groupby(sorted(requests, key=shape), batched):
        alike = list(group)
        yield from (alike[start : start + size] for start in range(0, len(alike), size))


def _inputs(
    model: nn.Module, requests: Sequence[Request], columns: int = 0
) -> dict[str, torch.Tensor]:
    """The prompts of a batch, padded on the left to the longest of them and ``columns`` more, and
    what the model gets of their pictures: pixels in its dtype, all on its device."""
    inner, width = inner_model(model), columns + max(len(each.prompt) for each in requests)
    ids_BT = torch.tensor([[0] * (width - len(each.prompt)) + [*each.prompt] for each in requests])
    mask_BT = torch.tensor(
        [[0] * (width - len(each.prompt)) + [1] * len(each.prompt) for each in requests]
    )
    inputs = {"input_ids": ids_BT, "attention_mask": mask_BT}
    pictures = [request.pictures for request in requests if request.pictures is not None]
    if pictures:
        inputs |= pictures[0].inputs(ids_BT, pictures)
    return {
        name: value.to(inner.device, inner.dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
    }


class _Chosen(LogitsProcessor):  # type: ignore[misc]
    """Chooses the tokens of rows that have not ended, and makes them the most probable ones."""

    def __init__(
        self, chooser: TokenChooser, rows: Sequence[OpenResponse], on_token: OnToken | None
    ) -> None:
        self._chooser, self._rows, self._on_token = chooser, rows, on_token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[B, V] scores of which only those of the chosen tokens are finite."""
        open_rows = [i for i, row in enumerate(self._rows) if row.finish_reason is None]
        rows = [self._rows[i] for i in open_rows]
        tokens = self._chooser.advance(scores[open_rows], rows)
        if self._on_token is not None:
            for row, token in zip(rows, tokens, strict=True):
                self._on_token(row.request, token)
        forced_BV = torch.full_like(scores, -torch.inf)
        forced_BV[:, 0] = 0.0  # of rows that have ended, which transformers replaces
        forced_BV[open_rows, 0] = -torch.inf
        forced_BV[open_rows, tokens] = 0.0
        return forced_BV


class _Ended(StoppingCriteria):  # type: ignore[misc]
    """Whether each row has ended: transformers sees only the tokens that end responses."""

    def __init__(self, rows: Sequence[OpenResponse]) -> None:
        self._rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        """[B] booleans."""
        ended = [row.finish_reason is not None for row in self._rows]
        return torch.tensor(ended, device=input_ids.device)


def _may_share(model: nn.Module, requests: Sequence[Request]) -> bool:
    """Whether a row has the logits beside another one that it has alone: in transformers 5.23,
    steps of RWKV mix the states of rows. Tried once for each model, and once with pictures, on the
    shortest of ``requests`` beside the longest."""
    inner = inner_model(model)
    attributes, has_pictures = vars(inner), requests[0].pictures is not None
    tried = _TRIED_PICTURES if has_pictures else _TRIED
    if tried not in attributes:
        if has_pictures:
            by_length = sorted(requests, key=lambda request: len(request.prompt))
            both, columns = [by_length[0], by_length[-1]], _COLUMNS
        else:
            size = inner.config.get_text_config().vocab_size
            prompts = [tuple(n % size for n in ids) for ids in ((5, 9, 11), (20, 3, 7))]
            both = [replace(requests[0], prompt=prompt) for prompt in prompts]
            columns = 0
        most = min(8, *(request.most for request in requests))
        alone, beside = (
            _generate(
                model,
                **_inputs(model, batch, added),
                max_new_tokens=most,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            ).logits
            for batch, added in ((both[:1], 0), (both, columns))
        )
        attributes[tried] = all(agree(b[:1], a) for a, b in zip(alone, beside, strict=True))
        if not attributes[tried]:
            fell_back(
                f"{type(inner).__name__}: prompts are answered one by one",
                "rows of a batch change each other",
                "is slower, and generate.batch_size has no effect",
            )
    return bool(attributes[tried])


def _generate(model: nn.Module, **settings: Any) -> Any:
    """What transformers generates of the most probable tokens, by ``settings`` alone: without those
    of the model's own configuration."""
    inner = inner_model(model)
    before, inner.generation_config = inner.generation_config, GenerationConfig()
    try:
        return cast(PreTrainedModel, model).generate(
            do_sample=False,
            synced_gpus=False,  # ranks with other prompts need not be waited for at each token
            **settings,
        )
    finally:
        inner.generation_config = before
