"""The examples of a recipe: all of them if the cache has them, otherwise a sample of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from ...batch import Features
from ...data.data_order import mixed
from ...data.example import Example, items_of
from ...data.rows.catalog import Catalog
from ...data.rows.registry import DatasetEntry
from ...data.rows.row_sources import BrokenRow
from ...data.rows.rows import read_rows
from ...data.store.dataset import EncodedDataset, in_memory, join
from ...data.text.codec import Codec
from ...data.training_data import find, mixing_of
from ...errors import DataError, counted
from ...recipe.recipe import Recipe
from ...recipe.recipe_data import encoding_of

ROWS = 1000  # of each dataset, spread evenly over it


@dataclass(frozen=True)
class ExampleLengths:
    """The training examples. In a sample, each example stands for several."""

    dataset: EncodedDataset
    rows_read: int | None = None  # how many rows were encoded to know; None: all, from the cache


def examples_of(recipe: Recipe, codec: Codec) -> ExampleLengths:
    """The training examples of ``recipe``; nothing is written to the cache. Raises ``DataError`` if
    a dataset is missing or broken, or has no trained tokens."""
    if not recipe.data.streaming:
        cached = find(encoding_of(recipe, codec, replace(recipe.data, eval_datasets=())))
        if cached is not None:
            return ExampleLengths(cached.train)
    catalog = Catalog(recipe.data)
    samples = [_sample(recipe, codec, catalog.entry(name)) for name in recipe.data.datasets]
    stores = [in_memory(sample.items).stores[0] for sample in samples]
    held_out = recipe.data.val_size  # a share, or a number of examples
    num_rows = sum(sample.rows for sample in samples)
    share = max(0.0, 1 - (held_out if held_out < 1 else held_out / num_rows))
    counts = [
        max(1, round(len(store) * sample.rows / sample.read * share))
        for store, sample in zip(stores, samples, strict=True)
    ]
    which, places = mixed(mixing_of(recipe.data, recipe.train.seed), counts)
    starts = np.cumsum([0, *map(len, stores)])
    index = starts[which] + places % np.diff(starts)[which]
    dataset = EncodedDataset(join(stores).stores, index)
    return ExampleLengths(dataset, sum(sample.read for sample in samples))


@dataclass(frozen=True)
class _Sample:
    items: Sequence[Features]
    read: int  # rows that were encoded
    rows: int  # that there are


def _sample(recipe: Recipe, codec: Codec, entry: DatasetEntry) -> _Sample:
    rows = sum(1 for _ in read_rows(entry, recipe.data))
    chosen = list(islice(read_rows(entry, recipe.data), 0, None, -(-rows // ROWS)))
    if entry.num_samples is not None and not recipe.data.streaming:
        rows = min(entry.num_samples, recipe.data.max_samples or entry.num_samples)
    items = _encoded(recipe, codec, chosen)
    if not items:
        raise DataError(
            f"dataset {entry.name!r}: none of {counted(len(chosen), 'row')} has trained tokens; "
            "`surefoot preview` shows why"
        )
    return _Sample(items, len(chosen), rows)


def _encoded(
    recipe: Recipe, codec: Codec, rows: Sequence[Example | BrokenRow]
) -> Sequence[Features]:
    outcomes = recipe.stage.encode([row for row in rows if isinstance(row, Example)], codec)
    return [item for outcome in outcomes for item in items_of(outcome)]
