"""Generation by transformers, for models whose keys and values cannot be kept in slots.

Prompts of equal length share a batch, so that none is padded: padding may enter the state of a
recurrent model. Tokens are chosen as in slots: transformers only computes the logits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
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

from ._slots import inner_model
from .responses import Finished, OnToken, OpenResponse, Request, TokenChooser, agree

logger = logging.getLogger(__name__)
_TRIED = "has_independent_rows"  # an attribute of models that have been tried


def run(
    model: nn.Module,
    requests: Sequence[Request],
    chooser: TokenChooser,
    *,
    batch_size: int,
    on_token: OnToken | None = None,
) -> Iterator[Finished]:
    """The samples of ``requests``, one batch after another; with pictures, ``batch_size`` is 1."""
    device, stops = inner_model(model).device, sorted(chooser.stops)
    is_alone = batch_size == 1 or len(requests) == 1 or not _has_independent_rows(model)
    for batch in _batches(requests, 1 if is_alone else batch_size):
        rows = [chooser.opened(request) for request in batch]
        pictures, prompt = batch[0].pictures, batch[0].prompt
        media = {} if pictures is None else _placed(model, pictures.inputs(prompt))
        _generate(
            model,
            torch.tensor([request.prompt for request in batch], device=device),
            max_new_tokens=batch[0].most,
            eos_token_id=stops or None,
            pad_token_id=stops[0] if stops else 0,  # unused, after a response
            logits_processor=LogitsProcessorList([_Chosen(chooser, rows, on_token)]),
            stopping_criteria=StoppingCriteriaList([_Ended(rows)]),
            **media,
        )
        yield from ((row.request, row.sample) for row in rows)


def _batches(requests: Sequence[Request], size: int) -> Iterator[list[Request]]:
    """Requests that share a batch: equal remaining context, equal lengths."""

    def shape(request: Request) -> tuple[int, int]:
        return request.most, len(request.prompt)

    for _, group in groupby(sorted(requests, key=shape), shape):
        alike = list(group)
        yield from (alike[start : start + size] for start in range(0, len(alike), size))


def _placed(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Inputs on the model's device; pixels in its dtype, too."""
    inner = inner_model(model)
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


def _has_independent_rows(model: nn.Module) -> bool:
    """Whether a row has the logits beside another one that it has alone: in transformers 5.23,
    steps of RWKV mix the states of rows. Tried once for each model."""
    inner = inner_model(model)
    attributes = vars(inner)
    if _TRIED not in attributes:
        size = inner.config.get_text_config().vocab_size
        ids_2T = torch.tensor([[n % size for n in (5, 9, 11)], [n % size for n in (20, 3, 7)]])
        alone, beside = (
            _generate(
                model,
                ids_2T[:count].to(inner.device),
                max_new_tokens=8,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            ).logits
            for count in (1, 2)
        )
        attributes[_TRIED] = all(agree(b[:1], a) for a, b in zip(alone, beside, strict=True))
        if not attributes[_TRIED]:
            logger.warning(
                "%s: rows of a batch change each other, so prompts are answered one by one "
                "(generate.batch_size has no effect)",
                type(inner).__name__,
            )
    return bool(attributes[_TRIED])


def _generate(model: nn.Module, ids_BT: torch.Tensor, **settings: Any) -> Any:
    """What transformers generates of the most probable tokens, by ``settings`` alone: without those
    of the model's own configuration."""
    inner = inner_model(model)
    before, inner.generation_config = inner.generation_config, GenerationConfig()
    try:
        return cast(PreTrainedModel, model).generate(
            input_ids=ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            do_sample=False,
            synced_gpus=False,  # ranks with other prompts need not be waited for at each token
            **settings,
        )
    finally:
        inner.generation_config = before
