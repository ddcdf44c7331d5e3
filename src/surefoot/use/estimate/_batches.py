"""The examples of a run: all of them if the cache has them, otherwise a sample of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np

from ...batch import IGNORE_INDEX, Features
from ...data.data_order import Index, mixed
from ...data.example import Example, items_of
from ...data.order.loader import Loader, Shuffle
from ...data.order.micro_batches import Batching, balance_by_length, num_passes, positions, sums
from ...data.rows.catalog import Catalog
from ...data.rows.registry import DatasetEntry
from ...data.rows.rows import read_rows
from ...data.store.cache import EncodedStore
from ...data.store.dataset import EncodedDataset, in_memory, join
from ...data.training_data import find, mixing_of
from ...errors import DataError, counted
from ...run.parts import RunParts, collation_of

ROWS = 1000  # of each dataset, spread evenly over it


@dataclass(frozen=True)
class ExampleLengths:
    """The training examples. In a sample, each example stands for several."""

    dataset: EncodedDataset
    rows_read: int | None = None  # how many rows were encoded to know; None: all, from the cache


def examples_of(parts: RunParts) -> ExampleLengths:
    """The training examples of a run; nothing is written to the cache. Raises ``DataError`` if a
    dataset is missing or broken, or has no trained tokens."""
    section, encoding = parts.data, parts.encoding
    if not section.streaming:
        trained = replace(encoding.section, eval_datasets=())
        if (cached := find(replace(encoding, section=trained))) is not None:
            return ExampleLengths(cached.train)
    catalog = Catalog(section)
    samples = [_sample(parts, catalog.entry(name)) for name in section.datasets]
    stores = [in_memory(sample.items).stores[0] for sample in samples]
    held_out = section.val_size  # a share, or a number of examples
    num_rows = sum(sample.rows for sample in samples)
    share = max(0.0, 1 - (held_out if held_out < 1 else held_out / num_rows))
    counts = [
        max(1, round(len(store) * sample.rows / sample.read * share))
        for store, sample in zip(stores, samples, strict=True)
    ]
    which, places = mixed(mixing_of(section, parts.train.seed), counts)
    starts = np.cumsum([0, *map(len, stores)])
    index = starts[which] + places % np.diff(starts)[which]
    dataset = EncodedDataset(join(stores).stores, index)
    return ExampleLengths(dataset, sum(sample.read for sample in samples))


@dataclass(frozen=True)
class _Sample:
    items: Sequence[Features]
    read: int  # rows that were encoded
    rows: int  # that there are


def _sample(parts: RunParts, entry: DatasetEntry) -> _Sample:
    section = parts.data
    read = partial(read_rows, entry, section, reading=parts.encoding.reading)
    rows = sum(1 for _ in read())
    chosen = list(islice(read(), 0, None, -(-rows // ROWS)))
    if entry.num_samples is not None and not section.streaming:
        rows = min(entry.num_samples, section.max_samples or entry.num_samples)
    outcomes = parts.stage.encode([e for e in chosen if isinstance(e, Example)], parts.codec)
    items = [item for outcome in outcomes for item in items_of(outcome)]
    if not items:
        raise DataError(
            f"dataset {entry.name!r}: none of {counted(len(chosen), 'row')} has trained tokens; "
            "`surefoot preview` shows why"
        )
    return _Sample(items, len(chosen), rows)


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


def loader_of(parts: RunParts, dataset: EncodedDataset, num_processes: int) -> Loader:
    """The data order of a run over ``dataset``. Raises ``DataError`` if batches do not divide."""
    return Loader(
        Shuffle(dataset, parts.train.seed, parts.data.shuffle),
        Batching(
            collation_of(parts.stage, packing=parts.data.packing),
            micro_batch_size=parts.train.fixed_micro_batch_size,
            world_size=num_processes,
        ),
        global_batch_size=parts.train.global_batch_size,
    )


def course_of(parts: RunParts, loader: Loader, lengths: Index, trained: Index) -> RunLength:
    """Steps and tokens of the whole run."""
    section, stage, batching = parts.train, parts.stage, loader.batching
    per_window = stage.passes * stage.mini_batches
    steps_per_epoch = -(-len(lengths) // loader.global_batch_size) * per_window
    steps = section.max_steps or math.ceil(section.num_epochs * steps_per_epoch)
    windows = -(-steps // per_window)
    counts = np.zeros(2, np.int64)
    for items in _items(loader, windows):
        counts += [lengths[items].sum(), trained[items].sum()]
    counts = counts * stage.group_size * steps // (windows * stage.mini_batches)
    size = min(loader.global_batch_size, len(lengths))
    part = -(-size * stage.group_size // stage.mini_batches)
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


def shares_prompts(parts: RunParts) -> bool:
    """Whether a run computes the prompt of two responses once."""
    return parts.data.packing and parts.models.policy.section.attention != "flash_attention_2"


def token_counts(parts: RunParts, dataset: EncodedDataset) -> Index:
    """[items] The tokens of each item, without padding; prompts twice, unless they are shared."""
    if shares_prompts(parts):
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
