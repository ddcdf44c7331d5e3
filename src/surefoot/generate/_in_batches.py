"""Generation by transformers, for models whose keys and values cannot be kept in slots.

Prompts of similar length share a batch, padded on the left, so that all responses start at once.
Tokens are chosen as in slots: transformers only computes the logits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

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

from .responses import Finished, OnToken, OpenResponse, Request, TokenChooser
from .samples import Ids
from .slots import inner_model

logger = logging.getLogger(__name__)
_PADDABLE = "ignores_padding_of_prompts"  # an attribute of models that have been tried


def run(
    model: nn.Module,
    requests: Sequence[Request],
    chooser: TokenChooser,
    *,
    batch_size: int,
    on_token: OnToken | None = None,
) -> Iterator[Finished]:
    """The samples of ``requests``, one batch after another."""
    size = batch_size if _ignores_padding(model, requests, batch_size) else 1
    for batch in _batches(requests, size):
        rows = [chooser.opened(request) for request in batch]
        config = _config(batch[0].most, sorted(chooser.stops))
        chosen, prompts = _Chosen(chooser, rows, on_token), [row.request.prompt for row in rows]
        _generate(model, prompts, config, chosen, [_Ended(rows)])
        yield from ((row.request, row.sample) for row in rows)


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
        return _forced(scores, open_rows, tokens)


class _Ended(StoppingCriteria):  # type: ignore[misc]
    """Whether each row has ended: transformers sees only the tokens that end responses."""

    def __init__(self, rows: Sequence[OpenResponse]) -> None:
        self._rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        """[B] booleans."""
        ended = [row.finish_reason is not None for row in self._rows]
        return torch.tensor(ended, device=input_ids.device)


class _Forced(LogitsProcessor):  # type: ignore[misc]
    """Keeps the logits [B, V] of each step, and forces the same tokens in every row."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.found.append(scores.float())
        token = 11 * len(self.found) % scores.shape[1]
        return _forced(scores, range(len(input_ids)), [token] * len(input_ids))


def _forced(scores: torch.Tensor, rows: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Scores that leave ``rows`` only these tokens."""
    found = torch.full_like(scores, -torch.inf)
    found[:, 0] = 0.0  # of rows that have ended, which transformers replaces
    found[rows, 0] = -torch.inf
    found[rows, tokens] = 0.0
    return found


def _config(most: int, stops: Sequence[int]) -> GenerationConfig:
    """Greedy, of the tokens that are forced."""
    return GenerationConfig(
        max_new_tokens=most,
        do_sample=False,
        eos_token_id=list(stops) or None,
        pad_token_id=stops[0] if stops else 0,  # masked before a prompt, unused after a response
    )


def _ignores_padding(model: nn.Module, requests: Sequence[Request], size: int) -> bool:
    """Whether a prompt that is padded to share a batch gets the response that it gets alone. Tried
    once for each model: padding may enter the state of a recurrent one."""
    if size == 1 or len({len(request.prompt) for request in requests}) < 2:
        return True
    known = vars(inner_model(model))
    if _PADDABLE not in known:
        known[_PADDABLE] = _is_padded_as_alone(model)
        if not known[_PADDABLE]:
            logger.warning(
                "%s: responses depend on padding, so prompts are answered one by one "
                "(generate.batch_size has no effect)",
                type(inner_model(model)).__name__,
            )
    return bool(known[_PADDABLE])


def _is_padded_as_alone(model: nn.Module) -> bool:
    inner = inner_model(model)
    vocabulary = inner.config.get_text_config().vocab_size
    short, long = ([(7 * n + 3) % vocabulary for n in range(count)] for count in (3, 16))
    alone, padded = (_logits_of_first(model, rows) for rows in ([short], [short, long]))
    # in few bits, sums of another length may differ by more
    share = 1e-3 if inner.dtype == torch.float32 else 0.1
    return float((alone - padded).abs().max()) <= share * float(alone.abs().max())


def _logits_of_first(model: nn.Module, prompts: Sequence[Ids]) -> torch.Tensor:
    """[steps, V] of the first prompt; a state that padding has entered may show in later ones."""
    recorder = _Forced()
    _generate(model, prompts, _config(8, ()), recorder)
    return torch.stack([logits[0] for logits in recorder.found])


def _batches(requests: Sequence[Request], size: int) -> Iterator[list[Request]]:
    """Requests that share a batch: equal remaining context, similar lengths."""
    batch: list[Request] = []
    for request in sorted(requests, key=lambda one: (one.most, len(one.prompt))):
        if batch and (len(batch) == size or request.most != batch[0].most):
            yield batch
            batch = []
        batch.append(request)
    if batch:
        yield batch


def _generate(
    model: nn.Module,
    prompts: Sequence[Ids],
    config: GenerationConfig,
    processor: LogitsProcessor,
    ends: Sequence[StoppingCriteria] = (),
) -> None:
    """Run the model; ``processor`` gets the logits of each step and says which tokens follow,
    ``ends`` which rows have ended."""
    inner = inner_model(model)
    longest, filler = max(map(len, prompts)), config.pad_token_id
    missing = [longest - len(prompt) for prompt in prompts]
    rows = [[filler] * n + list(p) for n, p in zip(missing, prompts, strict=True)]
    mask = [[0] * n + [1] * len(p) for n, p in zip(missing, prompts, strict=True)]
    with _alone(inner, config):
        cast(PreTrainedModel, model).generate(
            input_ids=torch.tensor(rows, device=inner.device),
            attention_mask=torch.tensor(mask, device=inner.device),
            generation_config=config,
            logits_processor=LogitsProcessorList([processor]),
            stopping_criteria=StoppingCriteriaList(ends),
            synced_gpus=False,  # ranks with other prompts need not be waited for at each token
        )


@contextmanager
def _alone(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """Generate by ``config`` alone, without settings of the model's own."""
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own
