"""Examples to one micro-batch: a packed row, or a padded rectangle."""

from __future__ import annotations

from collections.abc import Sequence

from ...batch import IGNORE_INDEX, Batch, Features
from .packing import pack


def collate(features: Sequence[Features], *, packing: bool, pad_token_id: int = 0) -> Batch:
    """One micro-batch of the ``input_ids`` and ``labels`` of examples.

    The first label of an example becomes ``IGNORE_INDEX``, because no token before it predicts it.
    """
    return pack(features) if packing else pad(features, pad_token_id)


def pad(features: Sequence[Features], pad_token_id: int = 0) -> Batch:
    """A rectangle as wide as the longest example; the others are padded on the right."""
    import numpy as np
    import torch

    shape = (len(features), max(len(item["input_ids"]) for item in features))
    input_ids = np.full(shape, pad_token_id)
    labels = np.full(shape, IGNORE_INDEX)
    attention_mask = np.zeros(shape, np.int64)
    for row, item in enumerate(features):
        length = len(item["input_ids"])
        input_ids[row, :length] = item["input_ids"]
        labels[row, :length] = item["labels"]
        attention_mask[row, :length] = 1
    labels[:, 0] = IGNORE_INDEX
    position_ids = np.tile(np.arange(shape[1]), (shape[0], 1))
    return Batch(
        torch.from_numpy(input_ids),
        torch.from_numpy(labels),
        torch.from_numpy(position_ids),
        torch.from_numpy(attention_mask),
    )
