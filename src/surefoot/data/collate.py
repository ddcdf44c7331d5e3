"""Examples to one micro-batch: a packed row, or a padded rectangle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..batch import IGNORE_INDEX, Batch, Features
from .pack import pack


def collate(features: Sequence[Features], *, packing: bool, pad_token_id: int = 0) -> Batch:
    """One micro-batch of the ``input_ids`` and ``labels`` of examples.

    The first label of an example becomes ``IGNORE_INDEX``: no token before it predicts it.
    """
    return pack(features) if packing else pad(features, pad_token_id)


def pad(features: Sequence[Features], pad_token_id: int = 0) -> Batch:
    """A rectangle as wide as the longest example, the others filled up on the right."""
    shape = (len(features), max(len(item["input_ids"]) for item in features))
    input_ids = torch.full(shape, pad_token_id)
    labels = torch.full(shape, IGNORE_INDEX)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    for row, item in enumerate(features):
        length = len(item["input_ids"])
        input_ids[row, :length] = torch.as_tensor(item["input_ids"])
        labels[row, :length] = torch.as_tensor(item["labels"])
        attention_mask[row, :length] = 1
    labels[:, 0] = IGNORE_INDEX
    position_ids = torch.arange(shape[1]).expand(shape).contiguous()
    return Batch(input_ids, labels, position_ids, attention_mask)
