"""Run a transformers model over slots: prompts at once, then one token of each row.

Prompts of the same padded length share a pass. They are padded on the right, where nothing that
counts sees the padding, so that the pass has the architecture's own masks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel

from .masks import Masks
from .samples import Ids
from .slots import ROWS, SlotCache, rounded

_UNIT = 16  # lengths of prompts in a pass are multiples of it
_MASKED = ("sdpa", "eager")  # attention that takes a mask of each row
Prefix = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values of each layer, [H, T, E]


def inner_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, or ``model`` itself."""
    is_plain = isinstance(model, PreTrainedModel)
    return cast(PreTrainedModel, model if is_plain else model.get_base_model())  # type: ignore[operator]


def cache_argument(inner: PreTrainedModel, cache: Cache) -> dict[str, Cache]:
    """``cache`` as an argument of the model's forward pass. transformers 5.24 has renamed it from
    ``past_key_values`` in its own models; code beside a checkpoint may have the former name."""
    is_renamed = "cache" in inspect.signature(inner.forward).parameters
    return {"cache" if is_renamed else "past_key_values": cache}


def padded_length(prompt: Ids) -> int:
    """The length of the pass of all tokens of ``prompt`` but the last one: it depends on no other
    prompt, so that the values do not either."""
    return rounded(len(prompt) - 1, _UNIT)


class RowAdapters(Protocol):
    """Adapters of which each row of a pass has its own, or none."""

    def on(self, names: Sequence[str | None]) -> AbstractContextManager[None]:
        """A block in which the rows of a pass have these."""


@dataclass(frozen=True)
class Driver:
    """A model whose keys and values may be kept in slots."""

    model: nn.Module  # with its adapter
    inner: PreTrainedModel
    masks: Masks
    adapters: RowAdapters | None = None  # None: all rows have what the model has

    def prefill(self, prompts: Sequence[Ids], adapters: Sequence[str | None] = ()) -> list[Prefix]:
        """The keys and values of each prompt without its last token, computed with its adapter. All
        have the same padded length."""
        if len(prompts[0]) == 1:
            return [[] for _ in prompts]
        counts = [len(prompt) - 1 for prompt in prompts]
        length = padded_length(prompts[0])
        ids = [[*prompt[:-1], *[0] * (length - len(prompt) + 1)] for prompt in prompts]
        cache = DynamicCache()
        with self._with(adapters):
            self.model(
                input_ids=torch.tensor(ids, device=self.inner.device),
                use_cache=True,
                **cache_argument(self.inner, cache),
                **self._last_logits,
            )
        return [
            [(layer.keys[row, :, :count], layer.values[row, :, :count]) for layer in cache.layers]
            for row, count in enumerate(counts)
        ]

    def decode(
        self,
        cache: SlotCache,
        tokens: Sequence[int],
        positions: Sequence[int],
        adapters: Sequence[str | None] = (),
    ) -> torch.Tensor:
        """[B, V] the logits after one more token in each of the first slots."""
        device, count = self.inner.device, len(tokens)
        cache.step.set(positions, device)
        filler = rounded(count, ROWS) - count  # rows that are computed as the first one
        tokens_B = torch.tensor([*tokens, *[tokens[0]] * filler], device=device)
        positions_B = torch.tensor([*positions, *[positions[0]] * filler], device=device)
        # nobody reads what becomes of a filler; but all rows alike need no indices
        of_filler = adapters[0] if len(set(adapters)) == 1 else None
        is_eager = self.inner.config._attn_implementation == "eager"
        added_as = self.inner.dtype if is_eager else None
        with self._with([*adapters, *[of_filler] * filler]):
            found = self.model(
                input_ids=tokens_B[:, None],
                attention_mask=self.masks.at(positions_B, cache.step.length, added_as),
                position_ids=positions_B[:, None],
                use_cache=True,
                **cache_argument(self.inner, cache),
            )
        logits_BV: torch.Tensor = found.logits[:count, -1]
        return logits_BV

    def _with(self, adapters: Sequence[str | None]) -> AbstractContextManager[None]:
        return nullcontext() if self.adapters is None else self.adapters.on(adapters)

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
