"""The examples of a recipe: all of them if the cache has them, otherwise a sample of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np

from ...batch import IGNORE_INDEX, Features
from ...data.data_order import Index, mixed
from ...data.example import BrokenRow, Example, items_of
from ...data.order.loader import Loader, Shuffle
from ...data.order.micro_batches import Batching, balance_by_length, num_passes, positions, sums
from ...data.rows.catalog import Catalog
from ...data.rows.registry import DatasetEntry
from ...data.rows.rows import read_rows
from ...data.store.cache import EncodedStore
from ...data.store.dataset import EncodedDataset, in_memory, join
from ...data.text.codec import Codec
from ...data.training_data import find, mixing_of
from ...errors import DataError, counted
from ...recipe.recipe import Recipe
from ...recipe.recipe_data import encoding_of, reading_of
from ...run.parts import collation_of

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
    read = partial(read_rows, entry, recipe.data, reading=reading_of(recipe.stage, codec))
    rows = sum(1 for _ in read())
    chosen = list(islice(read(), 0, None, -(-rows // ROWS)))
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


_ITEMS = 100_000  # examples whose labels are looked at together


@dataclass(frozen=True)
class RunLength:
    """The length of a run."""

    steps: int
    steps_per_epoch: int
    windows: int  # of examples that are loaded; a stage may take several steps on each
    gradient_accumulation_steps: int  # micro-batches of a process in a step
    # over all steps and processes, padding not counted, and a prompt for each sampled response
    tokens: int
    trained_tokens: int

    @property
    def epochs(self) -> float:
        """Passes over the data, with a fraction."""
        return self.steps / self.steps_per_epoch


def loader_of(recipe: Recipe, dataset: EncodedDataset, num_processes: int) -> Loader:
    """The data order of a run over ``dataset``. Raises ``DataError`` if batches do not divide."""
    return Loader(
        Shuffle(dataset, recipe.train.seed, recipe.data.shuffle),
        Batching(
            collation_of(recipe.stage, packing=recipe.data.packing),
            micro_batch_size=recipe.train.fixed_micro_batch_size,
            world_size=num_processes,
        ),
        global_batch_size=recipe.train.global_batch_size,
    )


def course_of(recipe: Recipe, loader: Loader, lengths: Index, trained: Index) -> RunLength:
    """Steps and tokens of the whole run."""
    section, stage, batching = recipe.train, recipe.stage, loader.batching
    per_window = stage.passes * stage.mini_batches
    steps_per_epoch = -(-len(lengths) // loader.global_batch_size) * per_window
    steps = section.max_steps or math.ceil(section.num_epochs * steps_per_epoch)
    windows = -(-steps // per_window)
    counts = np.zeros(2, np.int64)
    for items in _items(loader, windows):
        counts += [lengths[items].sum(), trained[items].sum()]
    counts = counts * stage.group_size * steps // (windows * stage.mini_batches)
    part = -(-loader.global_batch_size * stage.group_size // stage.mini_batches)
    return RunLength(
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        windows=windows,
        gradient_accumulation_steps=-(-part // (batching.micro_batch_size * batching.world_size)),
        tokens=int(counts[0]),
        trained_tokens=int(counts[1]),
    )


def heaviest(
    loader: Loader,
    steps: int,
    lengths: Index,
    trained: Index,
    *,
    logit_weight: float = 0.0,
    group_size: int = 1,
    added: int = 0,
) -> Index:
    """[items] The micro-batch that needs the most memory: tokens, padding included, plus trained
    positions times ``logit_weight``, the cost of one relative to a token. A stage makes
    ``group_size`` examples of each item, all with ``added`` tokens, which ``lengths`` include."""
    highest_cost, heaviest_items = -1.0, np.arange(0)
    batching, tokens_of = loader.batching, loader.order.examples.lengths_of
    size, ranks, packing = (
        batching.micro_batch_size,
        batching.world_size,
        batching.collation.packing,
    )
    for items in _items(loader, steps):
        for loaded in _windows(loader, items):
            windows = np.repeat(loaded, group_size, axis=1)
            count = num_passes(windows.shape[1], size, ranks)
            # The function that deals the examples of a run, for all windows at once: the largest
            # pass was chance while windows were split by number (docs/decisions/0036).
            dealt = tokens_of(windows) + added  # the run deals by these, shared prompts or not
            groups = balance_by_length(
                dealt, micro_batch_size=size, world_size=ranks, packing=packing
            )
            cost = positions(lengths[windows], groups, count, packing=packing)
            cost = cost + logit_weight * sums(trained[windows], groups, count)
            window, group = divmod(int(cost.argmax()), count)
            if cost[window, group] > highest_cost:
                highest_cost = float(cost[window, group])
                heaviest_items = windows[window][groups[window] == group]
    return heaviest_items


def _items(loader: Loader, steps: int) -> Iterator[Index]:
    """The items of each epoch, in order, as far as ``steps`` go."""
    size, epoch = loader.global_batch_size, 0
    while steps > 0:
        items = loader.order.indices(epoch, 0, steps * size)
        yield items
        steps, epoch = steps - -(-len(items) // size), epoch + 1


def _windows(loader: Loader, items: Index) -> Iterator[Index]:
    """[windows, items] The full windows, then the last one, if it is not full."""
    full = len(items) // loader.global_batch_size * loader.global_batch_size
    if full:
        yield items[:full].reshape(-1, loader.global_batch_size)
    if len(items) > full:
        yield items[None, full:]


def shares_prompts(recipe: Recipe) -> bool:
    """Whether a run computes the prompt of two responses once."""
    return recipe.data.packing and recipe.model.attention != "flash_attention_2"


def token_counts(recipe: Recipe, dataset: EncodedDataset) -> Index:
    """[items] The tokens of each item, without padding; prompts twice, unless they are shared."""
    if shares_prompts(recipe):
        return dataset.lengths
    again: Index = np.concatenate([_prompts(store) for store in dataset.stores])[dataset.index]
    return dataset.lengths + again


def _prompts(store: EncodedStore) -> Index:
    lengths = store.features.get("lengths")
    if lengths is None:
        return np.zeros(len(store), np.int64)
    prompts: Index = lengths.flat[:].reshape(-1, 3)[:, 0].astype(np.int64)
    return prompts


def trained_counts(dataset: EncodedDataset) -> Index:
    """[items] How many positions of each item have a label; the first one never does."""
    return np.concatenate([_trained(store) for store in dataset.stores])[dataset.index]


def _trained(store: EncodedStore) -> Index:
    total = np.zeros(len(store), np.int64)
    for name, (flat, offsets) in store.features.items():
        if not name.endswith("labels"):
            continue
        for start in range(0, len(store), _ITEMS):
            bounds = offsets[start : start + _ITEMS + 1]
            is_trained = flat[bounds[0] : bounds[-1]] != IGNORE_INDEX
            sums = np.concatenate([[0], np.cumsum(is_trained, dtype=np.int64)])
            begins, ends = bounds[:-1] - bounds[0], bounds[1:] - bounds[0]
            some = ends > begins
            first = np.zeros(len(begins), np.int64)
            first[some] = is_trained[begins[some]]
            total[start : start + _ITEMS] += sums[ends] - sums[begins] - first
    return total
