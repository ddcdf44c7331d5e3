"""Examples to one micro-batch: a packed row, or a padded rectangle.

A preference pair, a chosen and a rejected response to one prompt, is stored as prompt, chosen and
rejected, concatenated, with their ``lengths``: the prompt occurs once. A packed row keeps this form
(see ``Batch.branches``), and the prompt is computed once. Sampled responses are stored one by one,
with the ``lengths`` of prompt and response; a packed row joins neighbors that have the same prompt.
Other batches have a copy of the prompt for each response.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ...batch import IGNORE_INDEX, Batch, Features
from ..example import MEDIA_COLUMN


def collate(features: Sequence[Features], *, packing: bool) -> Batch:
    """One micro-batch of the ``input_ids`` and ``labels`` of examples.

    The first label of an example becomes ``IGNORE_INDEX``, because no token before it predicts it.
    """
    return pack(features) if packing else pad(features)


def pack(features: Sequence[Features]) -> Batch:
    """One row of all examples: positions restart in each, ``cu_seqlens`` contains their bounds.
    The prompt of several responses occurs once."""
    import numpy as np
    import torch

    def row(parts: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts))[None]

    features = _joined(features)
    lengths = [len(item["input_ids"]) for item in features]
    bounds = np.cumsum([0, *lengths], dtype=np.int32)
    labels = np.concatenate([np.asarray(item["labels"], np.int64) for item in features])
    labels[bounds[:-1]] = IGNORE_INDEX  # nothing before the first token says what it should be
    parts = [item.get("lengths", [length]) for item, length in zip(features, lengths, strict=True)]
    most = max(map(len, parts))
    branches = np.array([[*part, *[0] * (most - len(part))] for part in parts], np.int32)
    positions = [
        np.arange(start, start + length)
        for prompt, *responses in parts
        for start, length in ((0, prompt), *((prompt, length) for length in responses))
    ]
    return Batch(
        input_ids=row([np.asarray(item["input_ids"], np.int64) for item in features]),
        labels=torch.from_numpy(labels)[None],
        position_ids=row(positions),
        cu_seqlens=torch.from_numpy(bounds),
        branches=torch.from_numpy(branches) if most > 2 else None,
    )


def prompts_in_common(features: Sequence[Features]) -> list[int]:
    """For each example of one response, with ``lengths``: the tokens of its prompt, if the example
    before it has the same one; else 0."""
    import numpy as np

    def prompt(item: Features) -> Sequence[int]:
        lengths = item.get("lengths", ())
        return item["input_ids"][: lengths[0]] if len(lengths) == 2 and lengths[1] else ()

    pairs = pairwise([(), *map(prompt, features)])
    return [len(here) if np.array_equal(before, here) else 0 for before, here in pairs]


def _joined(features: Sequence[Features]) -> Sequence[Features]:
    """Examples, with a prompt that neighbors have in common once, as in a pair."""
    import numpy as np

    joined = list[dict[str, Any]]()
    for item, common in zip(features, prompts_in_common(features), strict=True):
        if not common:
            joined.append(dict(item))
            continue
        joined[-1]["lengths"] = [*joined[-1]["lengths"], item["lengths"][1]]
        for name in ("input_ids", "labels"):
            joined[-1][name] = np.concatenate([joined[-1][name], item[name][common:]])
    return joined


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


def join(chosen: Features, rejected: Features) -> Features:
    """Two conversations (``input_ids``, ``labels``) as a pair. Their common prefix without labels
    is the prompt; each response keeps at least one token. Raises ``ValueError``: they do not begin
    with the same token, or one is only that token."""
    both = (chosen, rejected)
    most = min(*(_first_label(item) for item in both), *(len(i["input_ids"]) - 1 for i in both))
    heads = zip(*(item["input_ids"][:most] for item in both), strict=True)
    length = next((i for i, (first, second) in enumerate(heads) if first != second), most)
    if length < 1:
        raise ValueError("chosen and rejected have no prompt in common")
    answers = [len(item["input_ids"]) - length for item in both]
    return {
        "input_ids": [*chosen["input_ids"], *rejected["input_ids"][length:]],
        "labels": [
            *[IGNORE_INDEX] * length,
            *chosen["labels"][length:],
            *rejected["labels"][length:],
        ],
        "lengths": [length, *answers],
        **pictures_of(chosen),  # of the prompt, so of both
    }


def pictures_of(item: Features) -> Features:
    """The column of an item's pictures, if it has one."""
    return {MEDIA_COLUMN: item[MEDIA_COLUMN]} if MEDIA_COLUMN in item else {}


def _first_label(item: Features) -> int:
    """Position of the first label that can be trained: nothing predicts a first token."""
    labels = item["labels"]
    return next((i for i in range(1, len(labels)) if labels[i] != IGNORE_INDEX), len(labels))


def split(pair: Features) -> Iterator[Features]:
    """A pair as two conversations again, chosen first."""
    import numpy as np

    prompt, chosen, _ = (int(length) for length in pair["lengths"])
    parts = {name: np.asarray(pair[name], np.int64) for name in ("input_ids", "labels")}
    first = {name: part[: prompt + chosen] for name, part in parts.items()}
    yield {**first, **pictures_of(pair)}  # type: ignore[dict-item]
    second = {n: np.concatenate([p[:prompt], p[prompt + chosen :]]) for n, p in parts.items()}
    yield {**second, **pictures_of(pair)}  # type: ignore[dict-item]


def with_chosen(item: Features) -> Features:
    """A conversation: ``item`` itself or, of a pair, the one with the chosen response."""
    return next(split(item)) if "lengths" in item else item


def collate_pairs(features: Sequence[Features], *, packing: bool) -> Batch:
    """One micro-batch of pairs (``input_ids``, ``labels``, ``lengths``).

    Its ``extras`` assign each trained position to a response: ``answer``, [N] int64, is 2 i for the
    chosen and 2 i + 1 for the rejected response of pair i, in the order of ``Outputs.logps``;
    ``answer_lengths``, [2 x pairs] int64, is the number of trained positions of each response.
    """
    import torch

    rows = [row for pair in features for row in split(pair)]
    batch = collate(features if packing else rows, packing=packing)
    answer_lengths = torch.tensor([num_trained(row) for row in rows])
    answer = torch.repeat_interleave(answer_lengths)
    return replace(batch, extras={"answer": answer, "answer_lengths": answer_lengths})


def unshared(batch: Batch) -> Batch:
    """The same batch with a prompt for each response, for a model that cannot share prompts."""
    import numpy as np
    import torch

    if batch.cu_seqlens is None or batch.branches is None:
        return batch
    runs, lengths = [], []
    for start, (prompt, *responses) in zip(
        batch.cu_seqlens.tolist(), batch.branches.tolist(), strict=False
    ):
        stop = start + prompt
        for length in filter(None, responses) if any(responses) else [0]:
            runs += [(start, start + prompt), (stop, stop + length)]
            lengths.append(prompt + length)
            stop += length
    index = torch.from_numpy(np.concatenate([np.arange(a, b) for a, b in runs]))
    return replace(
        batch,
        input_ids=batch.input_ids[:, index],
        labels=batch.labels[:, index],
        position_ids=batch.position_ids[:, index],
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
        branches=None,
        at=None,
        at_ends=None,
    )
