"""From the recipe's ``data`` section to datasets that are read while they are being encoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from ...errors import DataError, counted
from ..data_order import Index, hold_out
from ..order.block_shuffle import BlockShuffle
from ..rows.dataset_report import DatasetReport
from ..section import DataSection
from ..store.dataset import EncodedDataset, join
from ..store.shards import ROWS, RowSequence, encode_shard_again, encode_shards, rows_of
from ..store.stream import ExampleStream, StreamedDataset
from .encoded_data import EncodedData, Encoding, entries_of, prepare_evals
from .row_choice import mixed_rows, mixing_of

UNLIMITED = 1 << 62


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
    sources = _sources(encoding)
    parts = [StreamedDataset(source.name, _folder(source, encoding)) for source in sources]

    def repair(part: int, number: int) -> None:
        source, folder = sources[part], parts[part].folder
        if _folder(source, encoding) != folder:
            raise DataError(
                f"{folder}: shard {number} is damaged, and cannot be encoded again: "
                f"{source.source} has changed since; start the same command again"
            )
        encode_shard_again(source, encoding.encode, folder, number)

    is_mixed = len(sources) < len(section.datasets)  # then each dataset is checked as it is read
    limit = UNLIMITED if is_mixed else section.max_broken_rows
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
    for source in _sources(encoding):
        folder = _folder(source, encoding)
        yield from encode_shards(source, encoding.encode, folder, shard_rows=shard_rows)


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


def _sources(encoding: Encoding) -> list[RowSequence]:
    """The datasets one after another; or as one, if their rows are mixed."""
    section = encoding.section
    entries = [entry for entry in entries_of(section) if entry.name in section.datasets]
    mixing = mixing_of(section, encoding.seed)
    if mixing.is_plain:
        return [rows_of(entry, section, partial(encoding.key, entry)) for entry in entries]
    every = [rows_of(entry, section, partial(encoding.key, entry)) for entry in entries]
    how = f"{mixing} {section.max_broken_rows}"

    def stamp() -> str:
        return xxhash.xxh3_128_hexdigest(
            " ".join([how, *(each.stamp() for each in every)]).encode()
        )

    name = " + ".join(each.name for each in every)
    where = " or ".join(each.source for each in every)
    return [RowSequence(name, where, partial(mixed_rows, mixing, entries, section), stamp)]


def _folder(source: RowSequence, encoding: Encoding) -> Path:
    return encoding.root / f"{source.stamp()}.shards"
