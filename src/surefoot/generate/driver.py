"""Run a transformers model over slots: prompts at once, then one token of each row.

Prompts of the same padded length share a pass. They are padded on the right, where nothing that
counts sees the padding, so that the pass has the architecture's own masks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from .masks import Masks
from .samples import Ids
from .slots import MIN_ROWS, SlotCache, rounded

_UNIT = 16  # lengths of prompts in a pass are multiples of it
_MASKED = ("sdpa", "eager")  # attention that takes a mask of each row
Prefix = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values of each layer, [H, T, E]


def inner_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, or ``model`` itself."""
    is_plain = isinstance(model, PreTrainedModel)
    return cast(PreTrainedModel, model if is_plain else model.get_base_model())  # type: ignore[operator]


def padded_length(prompt: Ids) -> int:
    """The length of the pass of all tokens of ``prompt`` but the last one: it depends on no other
    prompt, so that the values do not either."""
    return rounded(len(prompt) - 1, _UNIT)


@dataclass(frozen=True)
class Driver:
    """A model whose keys and values may be kept in slots."""

    model: nn.Module  # with its adapter
    inner: PreTrainedModel
    masks: Masks

    def prefill(self, prompts: Sequence[Ids]) -> list[Prefix]:
        """The keys and values of each prompt without its last token. All have the same padded
        length."""
        if len(prompts[0]) == 1:
            return [[] for _ in prompts]
        counts = [len(prompt) - 1 for prompt in prompts]
        length = padded_length(prompts[0])
        ids = [[*prompt[:-1], *[0] * (length - len(prompt) + 1)] for prompt in prompts]
        cache = DynamicCache()
        self.model(
            input_ids=torch.tensor(ids, device=self.inner.device),
            past_key_values=cache,
            use_cache=True,
            **self._last_logits,
        )
        return [
            [(layer.keys[row, :, :count], layer.values[row, :, :count]) for layer in cache.layers]
            for row, count in enumerate(counts)
        ]

    def decode(
        self, cache: SlotCache, tokens: Sequence[int], positions: Sequence[int]
    ) -> torch.Tensor:
        """[B, V] the logits after one more token in each of the first slots."""
        device, count = self.inner.device, len(tokens)
        cache.step.set(positions, device)
        filler = [0] * (MIN_ROWS - count)  # rows that are computed as the first one
        tokens_B = torch.tensor([*tokens, *(tokens[0] for _ in filler)], device=device)
        positions_B = torch.tensor([*positions, *(positions[0] for _ in filler)], device=device)
        is_eager = self.inner.config._attn_implementation == "eager"
        added_as = self.inner.dtype if is_eager else None
        found = self.model(
            input_ids=tokens_B[:, None],
            attention_mask=self.masks.at(positions_B, cache.step.length, added_as),
            position_ids=positions_B[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        logits_BV: torch.Tensor = found.logits[:count, -1]
        return logits_BV

    @property
    def _last_logits(self) -> dict[str, int]:
        """The argument that keeps the head from computing all logits."""
        names = inspect.signature(self.inner.forward).parameters
        return {"logits_to_keep": 1} if "logits_to_keep" in names else {}


@contextmanager
def masked_attention(inner: PreTrainedModel) -> Iterator[None]:
    """An attention that takes a mask of each row, meanwhile."""
    before = inner.config._attn_implementation
    if before not in _MASKED:
        inner.set_attn_implementation("sdpa" if inner._supports_sdpa else "eager")
    try:
        yield
    finally:
        if inner.config._attn_implementation != before:
            inner.set_attn_implementation(before)
