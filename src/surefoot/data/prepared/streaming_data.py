"""From the recipe's ``data`` section to datasets that are read while they are being encoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import DataError, counted
from ..data_order import Index, hold_out
from ..order.block_shuffle import BlockShuffle
from ..rows.dataset_report import DatasetReport
from ..rows.registry import DatasetEntry
from ..section import DataSection
from ..store.dataset import EncodedDataset, join
from ..store.shards import ROWS, encode_shard_again, encode_shards
from ..store.stream import ExampleStream, StreamedDataset
from .encoded_data import EncodedData, Encoding, entries_of, prepare_evals


@dataclass(frozen=True)
class StreamingData:
    """What a run trains on while it is encoded, and what it is evaluated on."""

    train: ExampleStream
    held: Index  # items of the stream that ``val_size`` holds out, ascending
    evals: Mapping[str, EncodedDataset]  # by dataset; "" for what is held out

    @property
    def complete(self) -> Sequence[EncodedDataset]:
        """The evaluation sets."""
        return list(self.evals.values())

    def order(self, section: DataSection, *, seed: int) -> BlockShuffle:
        """The training examples as they are encoded, shuffled in blocks of ``buffer_size``."""
        size, shuffle = section.buffer_size, section.shuffle
        return BlockShuffle(self.train, seed, size, shuffle, held_out=self.held)

    def changed(self, change: Callable[[EncodedDataset], EncodedDataset]) -> StreamingData:
        """Raises ``DataError``: the training examples are not there yet."""
        raise DataError(
            "data.streaming: outputs of a model cannot be computed ahead for examples that are "
            "still being encoded; set data.streaming to false"
        )


TrainingData = EncodedData | StreamingData  # encoded before the first step, or while it trains


def open_stream(encoding: Encoding, more: Callable[[], None]) -> StreamingData:
    """The datasets of a recipe, which another process encodes; see ``ExampleStream`` for ``more``.

    The ``eval_datasets`` are encoded immediately; the rows that ``val_size`` holds out are waited
    for.
    """
    section = encoding.section
    entries = _training_entries(section)
    parts = [StreamedDataset(entry.name, _folder(entry, encoding)) for entry in entries]

    def repair(part: int, number: int) -> None:
        entry, folder = entries[part], parts[part].folder
        if _folder(entry, encoding) != folder:
            raise DataError(
                f"{folder}: shard {number} is damaged, and cannot be encoded again: "
                f"{entry.source} has changed since; start the same command again"
            )
        encode_shard_again(entry, section, encoding.encode, folder, number)

    limit = section.max_broken_rows
    stream = ExampleStream(parts, more, repair=repair, max_broken_rows=limit)
    evals = prepare_evals(encoding)
    held = held_items(stream, section, encoding.seed)
    if len(held):
        stores = stream.stores(int(held[-1]) + 1)
        evals[""] = EncodedDataset(join(stores).stores, held)
    return StreamingData(stream, held, evals)


def encode_stream(encoding: Encoding, *, shard_rows: int = ROWS) -> Iterator[DatasetReport]:
    """Encode the training datasets completely, one after another; yields the report of a dataset so
    far with each of its shards. Raises ``DataError`` if something is missing or broken, or has no
    trained tokens."""
    section, encode = encoding.section, encoding.encode
    for entry in _training_entries(section):
        folder = _folder(entry, encoding)
        yield from encode_shards(entry, section, encode, folder, shard_rows=shard_rows)


def held_items(stream: ExampleStream, section: DataSection, seed: int) -> Index:
    """The items of ``val_size`` rows among those of the first ``buffer_size`` items."""
    if not section.val_size:
        return np.empty(0, np.int64)
    rows = stream.rows(section.buffer_size + 1)
    if len(rows) > section.buffer_size:  # the last row may go on: none of it is held out
        rows = rows[rows != rows[-1]]
    _, numbers = np.unique(rows, return_inverse=True)
    if section.val_size >= (count := int(numbers.max(initial=-1)) + 1):
        raise DataError(
            f"data.val_size = {section.val_size:g} leaves nothing to train on: with "
            "data.streaming it holds out rows of the first data.buffer_size examples, which "
            f"are {counted(count, 'row')}"
        )
    return np.flatnonzero(
        hold_out(numbers, num_rows=count, val_size=section.val_size, seed=seed)
    ).astype(np.int64)


def _training_entries(section: DataSection) -> list[DatasetEntry]:
    return [entry for entry in entries_of(section) if entry.name in section.datasets]


def _folder(entry: DatasetEntry, encoding: Encoding) -> Path:
    return encoding.root / f"{encoding.key(entry, entry.source.stamp())}.shards"
