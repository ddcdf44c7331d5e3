"""From the recipe's ``data`` section to encoded datasets, through the cache.

Each dataset is encoded and cached by itself, so another combination, split or order of datasets
needs no new encoding. ``prepare`` encodes all of them first, and splits and mixes them item by
item. With ``data.streaming``, ``open_stream`` reads them while another process encodes them, and
mixes rows. Assembly calls one of the two once, before the model is loaded.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..batch import Features
from ..errors import DataError, counted
from .data_order import Index, Mixing, hold_out, mixed
from .example import MEDIA_COLUMN, BrokenRow, Example
from .media.files import MediaFiles, seen_in
from .order.loader import NOTHING, Shuffle
from .rows.catalog import Catalog, check_rows
from .rows.registry import DatasetEntry
from .rows.rows import ANY, Reading, read_rows, too_many_broken
from .section import DataSection
from .store._shards import (
    ROWS,
    DatasetReport,
    Encode,
    RowSequence,
    ShardedDataset,
    StartShare,
    report_from,
)
from .store.cache import Cached, EncodedStore, default_folder
from .store.dataset import EncodedDataset, ExampleStream, join

logger = logging.getLogger(__name__)

VERSION = 3  # of what this module and the formats make of a row; part of the fingerprint
ENCODING = ("template", "default_system", "cutoff_len", "on_too_long", "train_on_prompt")
SETTINGS = (*ENCODING, "mask_history", "max_samples")  # what the items of a dataset depend on
UNLIMITED = 1 << 62


Examples_co = TypeVar("Examples_co", bound=EncodedDataset | ExampleStream, covariant=True)


@dataclass(frozen=True)
class EncodingReport:
    """The counts of all datasets of a recipe."""

    datasets: tuple[DatasetReport, ...]
    held_out: int = 0  # examples that val_size took from the training data

    def lines(self) -> Iterator[str]:
        """The report as text."""
        for dataset in self.datasets:
            yield from dataset.lines()
        if self.held_out:
            yield f"examples held out for evaluation: {self.held_out:,}"


@dataclass(frozen=True)
class TrainingData(Generic[Examples_co]):
    """What a run trains on, what it is evaluated on, and what became of every row."""

    train: Examples_co
    evals: Mapping[str, EncodedDataset]  # by dataset; "" for what val_size holds out
    report: EncodingReport = field(default_factory=lambda: EncodingReport(()))
    held: Index = field(default_factory=lambda: NOTHING)  # items of a stream that are in ``evals``

    @property
    def whole(self) -> EncodedDataset | None:
        """The training examples, if all of them are encoded before the first step."""
        return self.train if isinstance(self.train, EncodedDataset) else None

    @property
    def has_pictures(self) -> bool:
        """Whether any example has one; of a stream, which is not known yet, True."""
        if self.whole is None:
            return True
        stores = [store for data in (self.whole, *self.evals.values()) for store in data.stores]
        columns = [store.features.get(MEDIA_COLUMN) for store in stores]
        return any(column is not None and column.offsets[-1] > 0 for column in columns)

    def order(self, section: DataSection, *, seed: int) -> Shuffle:
        """The order of the training examples in each epoch; see ``Shuffle``."""
        size = section.buffer_size if self.whole is None else None
        return Shuffle(self.train, seed, section.shuffle, size, self.held)


AnyData = TrainingData[EncodedDataset | ExampleStream]


def row_places(
    section: DataSection, source: EncodedDataset | ExampleStream, items: Sequence[int]
) -> list[str]:
    """Of each item of ``source``, which is made of the datasets of ``section``, the file and line
    of its row; the number of the row, where rows of several datasets were mixed."""
    names, rows = [str(name) for name in section.datasets], [source.row_of(i) for i in items]
    if isinstance(source, ExampleStream) and len(names) > 1:
        return [source.origin(item) for item in items]
    catalog, places = Catalog(section), dict[tuple[int, int], str]()
    for number in {number for number, _ in rows}:
        wanted = {row for of, row in rows if of == number}
        of_dataset = catalog.entry(names[number]).source.places(wanted)
        here = f"{Path.cwd()}/"  # a recipe has whole paths
        places |= {(number, row): at.removeprefix(here) for row, at in of_dataset.items()}
    return [places.get(row, source.origin(item)) for row, item in zip(rows, items, strict=True)]


def prepare(encoding: Encoding) -> TrainingData[EncodedDataset]:
    """Encode the datasets of a recipe, or load them from the cache. Raises ``DataError``: something
    is missing or broken, or has no trained tokens."""
    section = encoding.section
    data = _arrange(encoding, _load_all(Catalog(section).entries, encoding))
    _warn_of_trained_rows(section, data)
    if section.val_size == 1:
        logger.warning("data.val_size: 1 holds out one row; a share of the rows is below 1")
    return data


def _load_all(entries: Sequence[DatasetEntry], encoding: Encoding) -> dict[str, _Loaded]:
    """All datasets, by name. Before any is encoded, the first rows of all of them are read."""
    section = encoding.section
    for name in set(section.datasets) & set(section.eval_datasets):
        logger.warning(
            "dataset %r is used for training and for evaluation: its evaluation metrics do not "
            "measure generalization",
            name,
        )
    datasets = {entry.name: encoding.complete(entry) for entry in entries}
    cache = {name: dataset.find(0) for name, dataset in datasets.items()}
    missing = [entry for entry in entries if cache[entry.name] is None]
    check_rows(missing, section, encoding.reading)
    loaded = {}
    for entry in entries:
        start, how = time.monotonic(), "loaded from the cache"
        if (cached := cache[entry.name]) is None:
            cached = datasets[entry.name].encode_missing(0)
            how = f"encoded in {time.monotonic() - start:.1f} s"
        logger.info("%s: %s", entry.name, how)
        loaded[entry.name] = _Loaded.of(cached, entry, encoding)
        broken = loaded[entry.name].report.broken
        if len(broken) > section.max_broken_rows:
            raise too_many_broken(entry.name, broken, section.max_broken_rows)
    return loaded


@dataclass(frozen=True)
class _Loaded:
    """A complete dataset, and its rows in order."""

    store: EncodedStore
    report: DatasetReport
    order: Index  # as ``DrawnRows.order``
    num_rows: int  # the numbers of its rows are below this

    @classmethod
    def of(cls, cached: Cached, entry: DatasetEntry, encoding: Encoding) -> _Loaded:
        report = report_from(cached.report, entry.name, entry.source.remarks)
        drawn = encoding.drawn.get(entry.name) or DrawnRows(np.arange(report.rows), report.rows)
        return cls(cached.store, report, drawn.order, drawn.num_rows)

    @property
    def dataset(self) -> EncodedDataset:
        """Its items in order."""
        return EncodedDataset((self.store,), _epoch([self], Mixing()))


def _arrange(encoding: Encoding, loaded: Mapping[str, _Loaded]) -> TrainingData[EncodedDataset]:
    """The datasets, combined and split for training and evaluation."""
    section = encoding.section
    parts = [loaded[name] for name in section.datasets]
    evals = {str(name): loaded[name].dataset for name in section.eval_datasets}
    stores = tuple(part.store for part in parts)
    train = _epoch(parts, mixing_of(section, encoding.seed))
    if section.val_size:
        # Held out before rows are repeated: LLaMA-Factory interleaves first, so that a row is
        # trained on and evaluated on (decisions/0059).
        is_held_out = _held_out(parts, section.val_size, encoding.seed)
        evals[""] = EncodedDataset(stores, np.flatnonzero(is_held_out))
        train = train[~is_held_out[train]]
    reports = tuple(each.report for each in loaded.values())
    report = EncodingReport(reports, len(evals.get("", ())))
    return TrainingData(EncodedDataset(stores, train), evals, report)


def _epoch(parts: Sequence[_Loaded], mixing: Mixing) -> Index:
    """The items of an epoch, as positions in the concatenated stores, before any is held out. A row
    has no item, one, or several, which stay together."""
    which, places = mixed(mixing, [len(part.order) for part in parts])
    starts = np.cumsum([0, *(len(part.store) for part in parts)])
    first, end = np.empty((2, len(which)), np.int64)  # [rows drawn] the items of each
    for number, part in enumerate(parts):
        is_of_part = which == number
        rows = part.order[places[is_of_part]]
        first[is_of_part] = starts[number] + np.searchsorted(part.store.rows, rows, "left")
        end[is_of_part] = starts[number] + np.searchsorted(part.store.rows, rows, "right")
    counts = end - first
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(int(counts.sum()))


def _held_out(parts: Sequence[_Loaded], val_size: float, seed: int) -> NDArray[np.bool_]:
    """[items] whether it is held out; all pieces of a row are, and each time that it is drawn."""
    starts = np.cumsum([0, *(part.num_rows for part in parts)])
    rows = [part.store.rows + start for part, start in zip(parts, starts, strict=False)]
    return hold_out(np.concatenate(rows), num_rows=int(starts[-1]), val_size=val_size, seed=seed)


def _warn_of_trained_rows(section: DataSection, data: TrainingData[EncodedDataset]) -> None:
    """Say which evaluation rows are trained on, too, under another name or in another order. Their
    metrics would look like generalization, and are memory."""
    for name, evaluated in data.evals.items():
        if not name or name in section.datasets:
            continue
        # Hashing a row takes 30 µs. In a large dataset nearly every row has the length of some
        # evaluation row, so a few of its tokens are compared first.
        items = np.flatnonzero(np.isin(data.train.sketches, evaluated.sketches)).tolist()
        trained = {_hash_of_content(data.train[item]) for item in items}
        if num_trained := sum(
            _hash_of_content(evaluated[i]) in trained for i in range(len(evaluated))
        ):
            logger.warning(
                "evaluation dataset %r: %s of its %s are trained on, too, under another name: its "
                "evaluation metrics do not measure generalization",
                name,
                f"{num_trained:,}",
                counted(len(evaluated), "example"),
            )


def _hash_of_content(features: Features) -> bytes:
    """Of tokens, and of pictures wherever they are: their tokens are the same for all of a size."""
    tokens = (ids for name, ids in features.items() if name.endswith("input_ids"))
    parts = [np.asarray(ids, np.int32).tobytes() for ids in tokens]
    parts += [seen.digest.encode() for seen in seen_in(features)]
    return xxhash.xxh3_128_digest(b"|".join(parts))


def find(encoding: Encoding) -> TrainingData[EncodedDataset] | None:
    """What ``prepare`` would load from the cache; None unless all of it is there."""
    loaded = {}
    for entry in Catalog(encoding.section).entries:
        cached = encoding.complete(entry).find(0)
        if cached is None:
            return None
        loaded[entry.name] = _Loaded.of(cached, entry, encoding)
    return _arrange(encoding, loaded)


def open_stream(
    encoding: Encoding, more: Callable[[], None] | None = None
) -> TrainingData[ExampleStream]:
    """The datasets of a recipe, which another process encodes; see ``ExampleStream`` for ``more``.
    Without it, they are encoded here, as far as they are read.

    The ``eval_datasets`` are encoded immediately; the rows that ``val_size`` holds out are waited
    for.
    """
    section, parts = encoding.section, encoding.streamed()
    is_mixed = len(parts) < len(section.datasets)  # then each dataset is checked as it is read
    limit = UNLIMITED if is_mixed else section.max_broken_rows
    more = more or partial(next, encode_stream(encoding), None)
    stream = ExampleStream(parts, more, max_broken_rows=limit)
    entries = [entry for entry in Catalog(section).entries if entry.name in section.eval_datasets]
    evals = {name: each.dataset for name, each in _load_all(entries, encoding).items()}
    held_out = _held_items(stream, section, encoding.seed)
    if len(held_out):
        evals[""] = EncodedDataset(join(stream.stores(int(held_out[-1]) + 1)).stores, held_out)
    return TrainingData(stream, evals, held=held_out)


def _held_items(stream: ExampleStream, section: DataSection, seed: int) -> Index:
    """The items of ``val_size`` rows among those of the first ``buffer_size`` items of a stream."""
    if not section.val_size:
        return NOTHING
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
    is_held_out = hold_out(numbers, num_rows=count, val_size=section.val_size, seed=seed)
    return np.flatnonzero(is_held_out).astype(np.int64)


def encode_stream(encoding: Encoding, *, shard_rows: int = ROWS) -> Iterator[DatasetReport]:
    """Encode the training datasets completely, one after another; yields the report of a dataset so
    far with each of its shards. Raises ``DataError`` if something is missing or broken, or has no
    trained tokens."""
    for dataset in encoding.streamed(shard_rows):
        yield from dataset.encoded()


@dataclass(frozen=True)
class Encoding:
    """The datasets of a recipe, and all that determines what is encoded of them."""

    section: DataSection  # which datasets, from where, and how
    encode: Encode  # turns examples into features; one outcome per example
    fingerprint: Mapping[str, str]  # of all other inputs of ``encode``: tokenizer, template, stage
    seed: int  # determines which rows are drawn and held out, and how datasets are mixed
    drawn_for: DataSection | None = None  # if not ``section``, of which the rows are drawn
    start_share: StartShare | None = None  # a process that encodes a share of a dataset
    media: MediaFiles | None = None  # where the pictures of rows are
    reading: Reading = ANY  # what reads the rows beside ``encode``; a function of ``fingerprint``

    def key(self, entry: DatasetEntry, content: str) -> str:
        """The fingerprint of all inputs of an encoded dataset."""
        settings = {name: str(v) for name, v in self.section.cache_settings(SETTINGS).items()}
        parts = [VERSION, entry.describe(), content, settings, dict(self.fingerprint)]
        if (drawn := self.drawn.get(entry.name)) is not None:
            parts.append(xxhash.xxh3_128_hexdigest(drawn.distinct.tobytes()))
        return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())

    @cached_property
    def drawn(self) -> Mapping[str, DrawnRows]:
        """The rows of datasets with ``num_samples``. Of data that is streamed, none are drawn: the
        first ones are read."""
        section = self.drawn_for or self.section
        if section.streaming:
            return {}
        catalog = Catalog(section)
        entries = [catalog.entry(name) for name in (*section.datasets, *section.eval_datasets)]
        return draw_rows(entries, max_samples=section.max_samples, seed=self.seed)

    def complete(self, entry: DatasetEntry) -> ShardedDataset:
        """A dataset that is encoded before it is read, known by its content."""
        return self._opened(self._rows(entry, entry.source.content_hash), None)

    def streamed(self, shard_rows: int = ROWS) -> list[ShardedDataset]:
        """The training datasets, one after another; or as one, if their rows are mixed."""
        section = self.section
        entries = [entry for entry in Catalog(section).entries if entry.name in section.datasets]
        # Known by size and times of the files: to hash what may be terabytes would be to wait for
        # all of it (decisions/0033).
        rows = [self._rows(entry, entry.source.stamp) for entry in entries]
        mixing = mixing_of(section, self.seed)
        if not mixing.is_plain:
            rows = [self._mixed(mixing, entries, rows)]
        return [self._opened(each, shard_rows) for each in rows]

    def _opened(self, rows: RowSequence, shard_rows: int | None) -> ShardedDataset:
        root = self.section.cache_dir or default_folder()
        key = rows.fingerprint()
        how = self.encode, root, key, shard_rows, self.start_share
        return ShardedDataset(rows, *how, media=self.media)

    def _rows(self, entry: DatasetEntry, content: Callable[[], str]) -> RowSequence:
        drawn = self.drawn.get(entry.name)
        numbers = None if drawn is None else drawn.distinct
        return RowSequence(
            entry.name,
            str(entry.source),
            read=partial(read_rows, entry, self.section, numbers, self.reading),
            fingerprint=lambda: self.key(entry, content()),
            remarks=entry.source.remarks,
            numbers=numbers,
        )

    def _mixed(
        self, mixing: Mixing, entries: Sequence[DatasetEntry], rows: Sequence[RowSequence]
    ) -> RowSequence:
        def fingerprint() -> str:
            parts = [f"{mixing} {self.section.max_broken_rows}", *(r.fingerprint() for r in rows)]
            return xxhash.xxh3_128_hexdigest(" ".join(parts).encode())

        name = " + ".join(each.name for each in rows)
        source = " or ".join(each.source for each in rows)
        read = partial(mixed_rows, mixing, entries, self.section, self.reading)
        return RowSequence(name, source, read, fingerprint)


@dataclass(frozen=True)
class DrawnRows:
    """The rows that ``num_samples`` draws of a dataset, in the order in which they are drawn."""

    order: Index  # more than there are rows: the rest is drawn again, with replacement
    num_rows: int  # of the dataset

    @property
    def distinct(self) -> Index:
        """The rows to encode, ascending."""
        return np.unique(self.order)


def draw_rows(
    entries: Sequence[DatasetEntry], *, max_samples: int | None, seed: int
) -> Mapping[str, DrawnRows]:
    """The rows of each dataset with ``num_samples``, the same as LLaMA-Factory draws: numpy's
    legacy generator, one dataset after another."""
    drawn: dict[str, DrawnRows] = {}
    generator = np.random.RandomState(seed % 2**32)
    for entry in entries:
        if entry.num_samples is None:
            continue
        count = sum(1 for _ in entry.source.rows())
        if not count:
            raise DataError(f"dataset {entry.name!r}: {entry.source} has no rows")
        order = generator.permutation(count)[: entry.num_samples]
        more = generator.choice(count, entry.num_samples - len(order))
        order = np.concatenate([order, more]).astype(np.int64)
        logger.info("%s: num_samples: %d drawn of %d rows", entry.name, len(order), count)
        drawn.setdefault(entry.name, DrawnRows(order[:max_samples], count))
    return drawn


def mixing_of(section: DataSection, seed: int) -> Mixing:
    """How the training datasets of a section are mixed; a single one is not."""
    if len(section.datasets) == 1:
        return Mixing()
    return Mixing(section.mix_strategy, section.interleave_probs, seed)


def mixed_rows(
    mixing: Mixing, entries: Sequence[DatasetEntry], section: DataSection, reading: Reading
) -> Iterator[Example | BrokenRow]:
    """The order of ``_epoch`` for datasets of unknown length: their rows, few of them in memory."""
    sources = [_Repeated(partial(read_rows, e, section, reading=reading), e) for e in entries]

    def is_at_end() -> bool:
        return mixing.is_at_end([source.is_done for source in sources], [1] * len(sources))

    for block in mixing.draws(len(sources)):
        for number in block.tolist():
            if mixing.repeats or not sources[number].is_done:
                yield sources[number].take()
            if mixing.probabilities is not None and is_at_end():
                return
        if is_at_end():
            return


class _Repeated:
    """The rows of a dataset, again and again. One row is read ahead, so that the end is known."""

    def __init__(
        self, read: Callable[[], Iterator[Example | BrokenRow]], entry: DatasetEntry
    ) -> None:
        self._read, self._entry = read, entry
        self.is_done = False  # whether each row was taken
        self._rows = read()
        self._next = next(self._rows)  # a dataset without rows is an error

    def take(self) -> Example | BrokenRow:
        """The next row."""
        row, following = self._next, next(self._rows, None)
        if following is None:
            self.is_done, self._rows = True, self._read()
            following = next(self._rows)
        self._next = following
        if isinstance(row, BrokenRow):
            return replace(row, reason=f"of {self._entry.name!r}: {row.reason}")
        return row
