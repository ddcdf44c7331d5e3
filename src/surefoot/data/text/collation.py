"""Examples to one micro-batch: a packed row, or a padded rectangle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...batch import IGNORE_INDEX, Batch, Features


def collate(features: Sequence[Features], *, packing: bool) -> Batch:
    """One micro-batch of the ``input_ids`` and ``labels`` of examples.

    The first label of an example becomes ``IGNORE_INDEX``, because no token before it predicts it.
    """
    return pack(features) if packing else pad(features)


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


def pad(features: Sequence[Features]) -> Batch:
    """A rectangle as wide as the longest example; the others are padded on the right with token 0,
    which is neither attended to nor trained on."""
    import numpy as np
    import torch

    shape = (len(features), max(len(item["input_ids"]) for item in features))
    input_ids = np.zeros(shape, np.int64)
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


def with_owners(batch: Batch, features: Sequence[Features]) -> Batch:
    """The same batch with ``extras`` that say whose each trained position is: ``owner`` [N] the
    number of its example, ``lengths`` [E] the trained positions of each example."""
    import torch

    lengths = torch.tensor([num_trained(item) for item in features])
    owner = torch.repeat_interleave(lengths)
    return replace(batch, extras={**batch.extras, "owner": owner, "lengths": lengths})


def with_columns(batch: Batch, features: Sequence[Features], names: Sequence[str]) -> Batch:
    """The same batch with columns of values per example, as ``extras`` [E], where there are any."""
    import numpy as np
    import torch

    extras = dict(batch.extras)
    for name in names:
        if all(name in item for item in features):
            rows = [np.asarray(item[name]) for item in features]
            extras[name] = torch.from_numpy(np.concatenate([np.empty(0), *rows]))
    return replace(batch, extras=extras)


def with_token_columns(batch: Batch, features: Sequence[Features], names: Sequence[str]) -> Batch:
    """The same batch with columns of a value per trained position, as ``extras`` [N], where they
    are there. An example whose labels were removed has none."""
    return with_columns(batch, [item for item in features if num_trained(item)], names)


def num_trained(item: Features) -> int:
    """Trained positions of an example: nothing predicts its first token."""
    import numpy as np

    return int(np.count_nonzero(np.asarray(item["labels"])[1:] != IGNORE_INDEX))
