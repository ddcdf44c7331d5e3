"""Shifted sparse attention in training (S²-Attn of LongLoRA, arXiv:2309.12307).

Every document is divided into groups of G tokens, and each token attends within its group: to half
of the heads from the beginning of the document, to the other half shifted by G/2, so that their
groups overlap. The cost of a document of T tokens falls from T² to T G. Evaluation and generation
have full attention, and a trained model is an ordinary one.

The paper rolls the row, so that its first and last G/2 tokens share a group: there the first ones
attend to the last ones, their own future. Here the shifted half has a group of G/2 tokens at each
end instead. Groups start again in each document, so nothing depends on what is packed beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ...errors import ModelError
from .bounds import Bounds

Attend = Callable[..., tuple[torch.Tensor, None]]
_GROUP = "attention_group"  # an attribute of such models
_KEY = "model.shifted_attention_group"


def use_groups(model: PreTrainedModel, size: int) -> None:
    """Let ``model`` attend within groups of ``size`` tokens in training. Raises ``ModelError`` if
    its heads cannot be divided in two halves."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 0)
    if heads < 2 or heads % 2:
        raise ModelError(
            f"{_KEY}: {type(model).__name__} has {heads} attention heads, not two halves; remove it"
        )
    vars(model)[_GROUP] = size


def group_of(model: PreTrainedModel) -> int | None:
    """The tokens of a group, if ``model`` is in training mode and attends in groups."""
    size: int | None = vars(model).get(_GROUP)
    return size if model.training else None


def has_groups(model: PreTrainedModel) -> bool:
    """Whether ``model`` attends in groups when it is trained."""
    return vars(model).get(_GROUP) is not None


def refuse_without_groups(model: PreTrainedModel, reason: str) -> None:
    """Raise ``ModelError`` if ``model`` shall attend in groups, and for ``reason`` packed rows do
    not go through this module."""
    if has_groups(model):
        raise ModelError(
            f"{_KEY}: {type(model).__name__} cannot attend in groups: {reason}; remove it"
        )


def in_groups(attend: Attend) -> Attend:
    """``attend``, an attention function for packed rows, with groups where bounds have some."""

    def grouped(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        bounds = kwargs.get("document_bounds")
        if not isinstance(bounds, Bounds) or bounds.group is None:
            return attend(module, query, key, value, attention_mask, **kwargs)
        assert bounds.branches is None  # see ``settle_attention``
        heads = query.shape[1]
        if key.shape[1] % 2:  # one key for both halves
            repeats = heads // key.shape[1]
            key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
        halves = zip(*(each.chunk(2, dim=1) for each in (query, key, value)), strict=True)
        found = []
        for number, (q, k, v) in enumerate(halves):
            inside = {
                **kwargs,
                **_half(kwargs, number, heads),
                "document_bounds": bounds.half(number),
            }
            found.append(attend(module, q, k, v, None, **inside)[0])
        return torch.cat(found, dim=2), None

    return grouped


def _half(kwargs: Mapping[str, object], number: int, heads: int) -> dict[str, object]:
    """Arguments that have a value for each head."""
    sinks = cast("Any", kwargs.get("s_aux"))
    return {} if sinks is None else {"s_aux": sinks.view(heads).chunk(2)[number]}
