"""NEFTune (arXiv:2310.05914): uniform noise on the embeddings of tokens while a model is trained.

The noise of a token is at most ``alpha / sqrt(L d)``, with L tokens in its example and d hidden
dimensions, whatever is packed or padded beside the example.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import ModelError


def add_embedding_noise(module: nn.Module, inner: PreTrainedModel, alpha: float) -> None:
    """Add noise to the embeddings of ``inner`` in each forward pass of ``module``, its adapter
    included, in training mode. Torch's generator of the device draws it."""
    noise = _EmbeddingNoise(alpha)
    module.register_forward_pre_hook(noise.begin, with_kwargs=True)
    module.register_forward_hook(noise.end)
    inner.get_input_embeddings().register_forward_hook(noise.add)


@dataclass
class _EmbeddingNoise:
    alpha: float
    rows: Mapping[str, Any] | None = None  # in a forward pass whose embeddings have no noise yet

    def begin(self, module: nn.Module, _args: tuple[object, ...], rows: Mapping[str, Any]) -> None:
        self.rows = rows if module.training else None

    def add(
        self, _module: nn.Module, _args: tuple[object, ...], embedded: torch.Tensor
    ) -> torch.Tensor:
        if self.rows is None:
            return embedded
        positions, mask = self.rows.get("position_ids"), self.rows.get("attention_mask")
        self.rows = None
        if positions is None:  # a callback's call
            positions = torch.arange(embedded.shape[1], device=embedded.device)[None]
        limit = self.alpha / (document_lengths(positions, mask) * embedded.shape[-1]).sqrt()
        noise = torch.empty_like(embedded).uniform_(-1, 1)
        return embedded + noise * limit.unsqueeze(-1).to(noise.dtype)

    def end(self, module: nn.Module, _args: tuple[object, ...], _output: object) -> None:
        if self.rows is not None:
            raise ModelError(
                f"model.neftune_noise_alpha: {type(module).__name__} does not call its input "
                "embeddings, so they get no noise; remove the setting"
            )


def document_lengths(position_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """[B, T] int64: the number of tokens of the document around each token. ``position_ids``
    [B, T] are 0 at the first token of each document, ``mask`` [B, T] is 0 for padding."""
    if mask is not None:
        return mask.sum(1, keepdim=True).expand_as(mask)
    document = (position_ids == 0).cumsum(1)
    counts = torch.zeros_like(document).scatter_add_(1, document - 1, torch.ones_like(document))
    return counts.gather(1, document - 1)
