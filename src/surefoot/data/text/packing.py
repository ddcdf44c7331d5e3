"""Several examples packed into one row. No example attends to another (see ``model``)."""

from __future__ import annotations

from collections.abc import Sequence

from ...batch import IGNORE_INDEX, Batch, Features


def pack(features: Sequence[Features]) -> Batch:
    """One row of all examples: positions restart in each, ``cu_seqlens`` contains their bounds."""
    import numpy as np
    import torch

    def row(parts: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts))[None]

    lengths = [len(item["input_ids"]) for item in features]
    bounds = np.cumsum([0, *lengths], dtype=np.int32)
    labels = np.concatenate([np.asarray(item["labels"], np.int64) for item in features])
    labels[bounds[:-1]] = IGNORE_INDEX  # nothing before the first token says what it should be
    return Batch(
        input_ids=row([np.asarray(item["input_ids"], np.int64) for item in features]),
        labels=torch.from_numpy(labels)[None],
        position_ids=row([np.arange(length) for length in lengths]),
        cu_seqlens=torch.from_numpy(bounds),
    )
