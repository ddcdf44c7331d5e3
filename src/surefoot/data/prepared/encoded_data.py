"""From the recipe's ``data`` section to encoded datasets, through the cache.

Each dataset is encoded and cached by itself, so another combination, split or order of datasets
needs no new encoding.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...errors import DataError, counted
from ..data_order import Index, hold_out
from ..example import JSON
from ..order.full_shuffle import FullShuffle
from ..order.mixing import Mixing
from ..rows.catalog import Catalog, check_rows
from ..rows.dataset_report import DatasetReport, EncodingReport, report_from
from ..rows.registry import DatasetEntry
from ..rows.rows import read_examples, too_many_broken
from ..section import DataSection
from ..store import cache
from ..store.cache import Writer, default_folder, load_or_build
from ..store.dataset import EncodedDataset, EncodedStore, join
from ..store.encoder import Encode, Encoder, no_items_error
from .row_choice import DrawnRows, draw_rows, mixed_items, mixing_of

logger = logging.getLogger(__name__)

VERSION = 2  # of what this module and the formats make of a row; part of the fingerprint
ENCODING = ("template", "default_system", "cutoff_len", "on_too_long", "train_on_prompt")
SETTINGS = (*ENCODING, "mask_history", "max_samples")  # what the items of a dataset depend on


@dataclass(frozen=True)
class EncodedData:
    """What a run trains on, what it is evaluated on, and what became of every row."""

    train: EncodedDataset
    evals: Mapping[str, EncodedDataset]  # by dataset; "" for what val_size holds out
    report: EncodingReport

    @property
    def complete(self) -> Sequence[EncodedDataset]:
        """All datasets."""
        return [self.train, *self.evals.values()]

    def order(self, section: DataSection, *, seed: int) -> FullShuffle:
        """A permutation of the training examples for each epoch."""
        return FullShuffle(self.train, seed, section.shuffle)

    def changed(self, change: Callable[[EncodedDataset], EncodedDataset]) -> EncodedData:
        """The same with each dataset changed."""
        evals = {name: change(dataset) for name, dataset in self.evals.items()}
        return replace(self, train=change(self.train), evals=evals)


@dataclass(frozen=True)
class Encoding:
    """The datasets of a recipe, and all that determines what is encoded of them."""

    section: DataSection  # which datasets, from where, and how
    encode: Encode  # turns examples into features; one outcome per example
    fingerprint: Mapping[str, str]  # of all other inputs of ``encode``: tokenizer, template, stage
    seed: int  # determines which rows are drawn and held out, and how datasets are mixed
    drawn_for: DataSection | None = None  # if not ``section``, of which the rows are drawn

    @property
    def root(self) -> Path:
        """The folder of the cache."""
        return self.section.cache_dir or default_folder()

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


def prepare(encoding: Encoding) -> EncodedData:
    """Encode the datasets of a recipe, or load them from the cache. Raises ``DataError``: something
    is missing or broken, or has no trained tokens."""
    loaded = _load_all(entries_of(encoding.section), encoding)
    _warn_of_both(encoding.section)
    found = _arranged(encoding, loaded)
    _warn_of_the_same_rows(encoding.section, found)
    if encoding.section.val_size == 1:
        logger.warning("data.val_size: 1 holds out one row; a share of the rows is below 1")
    return found


def find(encoding: Encoding) -> EncodedData | None:
    """What ``prepare`` would load from the cache; None unless all of it is there."""
    loaded = {}
    for entry in entries_of(encoding.section):
        cached = cache.find(encoding.root, encoding.key(entry, entry.source.content_hash()))
        if cached is None:
            return None
        report = report_from(cached.report, entry.name, entry.source.remarks)
        loaded[entry.name] = _Loaded(cached.store, report, encoding.drawn.get(entry.name))
    return _arranged(encoding, loaded)


def prepare_evals(encoding: Encoding) -> dict[str, EncodedDataset]:
    """Encode only the ``eval_datasets``, or load them from the cache. Raises as ``prepare``."""
    section = encoding.section
    _warn_of_both(section)
    entries = [entry for entry in entries_of(section) if entry.name in section.eval_datasets]
    return {name: each.dataset for name, each in _load_all(entries, encoding).items()}


def entries_of(section: DataSection) -> list[DatasetEntry]:
    """Every dataset that a recipe names, once. All entries are checked before any is encoded."""
    return Catalog(section).entries


def _warn_of_both(section: DataSection) -> None:
    for name in set(section.datasets) & set(section.eval_datasets):
        logger.warning(
            "dataset %r is used for training and for evaluation: its evaluation metrics do not "
            "measure generalization",
            name,
        )


def _warn_of_the_same_rows(section: DataSection, found: EncodedData) -> None:
    """Rows under another name, or in another order, are the same rows."""
    names = [name for name in found.evals if name and name not in section.datasets]
    if not names:
        return
    trained = found.train.probes()
    for name in names:
        rows = found.evals[name].probes()
        alike = np.flatnonzero(np.isin(trained, rows)).tolist()
        texts = {found.train.tokens_of(item) for item in alike}
        kept = np.flatnonzero(np.isin(rows, trained)).tolist()
        if same := sum(found.evals[name].tokens_of(item) in texts for item in kept):
            logger.warning(
                "evaluation dataset %r: %s of its %s are trained on, too, under another name: its "
                "evaluation metrics do not measure generalization",
                name,
                f"{same:,}",
                counted(len(rows), "example"),
            )


def _arranged(encoding: Encoding, loaded: Mapping[str, _Loaded]) -> EncodedData:
    """The datasets, combined and split for training and evaluation."""
    section = encoding.section
    parts = [loaded[name] for name in section.datasets]
    evals = {str(name): loaded[name].dataset for name in section.eval_datasets}
    whole = join([part.store for part in parts])
    held = _held_out(parts, section.val_size, encoding.seed)
    train = _epoch(parts, mixing_of(section, encoding.seed))
    if section.val_size:
        evals[""] = EncodedDataset(whole.stores, np.flatnonzero(held))
        train = train[~held[train]]
    reports = tuple(each.report for each in loaded.values())
    dataset = EncodedDataset(whole.stores, train)
    return EncodedData(dataset, evals, EncodingReport(reports, len(evals.get("", ()))))


@dataclass(frozen=True)
class _Loaded:
    store: EncodedStore
    report: DatasetReport
    drawn: DrawnRows | None = None

    @property
    def num_rows(self) -> int:
        """The numbers of its rows are below this."""
        return self.report.rows if self.drawn is None else self.drawn.num_rows

    @property
    def order(self) -> Index:
        """Its rows in order."""
        return np.arange(self.report.rows) if self.drawn is None else self.drawn.order

    @property
    def dataset(self) -> EncodedDataset:
        """Its items in order."""
        return EncodedDataset((self.store,), _epoch([self], Mixing()))


def _epoch(parts: Sequence[_Loaded], mixing: Mixing) -> Index:
    """The items of an epoch, before any is held out."""
    if mixing.is_plain and all(part.drawn is None for part in parts):
        return np.arange(sum(len(part.store) for part in parts))
    return mixed_items(mixing, [part.order for part in parts], [part.store.rows for part in parts])


def _held_out(parts: Sequence[_Loaded], val_size: float, seed: int) -> NDArray[np.bool_]:
    """[items] whether it is held out; all pieces of a row are, and each time that it is drawn."""
    starts = np.cumsum([0, *(part.num_rows for part in parts)])
    rows = [part.store.rows + start for part, start in zip(parts, starts, strict=False)]
    every = np.concatenate(rows)
    if not val_size:
        return np.zeros(len(every), np.bool_)
    return hold_out(every, num_rows=int(starts[-1]), val_size=val_size, seed=seed)


def _load_all(entries: Sequence[DatasetEntry], encoding: Encoding) -> dict[str, _Loaded]:
    """All datasets, by name. Before any is encoded, the first rows of all of them are read."""
    contents = {entry.name: entry.source.content_hash() for entry in entries}
    keys = {entry.name: encoding.key(entry, contents[entry.name]) for entry in entries}
    new = [entry for entry in entries if cache.find(encoding.root, keys[entry.name]) is None]
    check_rows(new, encoding.section)
    return {entry.name: _load(entry, encoding, contents[entry.name]) for entry in entries}


def _load(entry: DatasetEntry, encoding: Encoding, content: str) -> _Loaded:
    section, drawn = encoding.section, encoding.drawn.get(entry.name)
    chosen = None if drawn is None else drawn.distinct

    def build(writer: Writer) -> JSON:
        limit = entry.limit(section.max_samples) if chosen is None else None
        broken = section.max_broken_rows
        rows = read_examples(entry, max_samples=limit, max_broken_rows=broken, chosen=chosen)
        report = Encoder(entry.name, encoding.encode, writer, chosen=chosen).run(rows)
        if not report.items:
            raise no_items_error(report)
        if entry.source.content_hash() != content:
            raise DataError(f"dataset {entry.name!r}: {entry.source} changed while it was read")
        return asdict(report)

    start = time.monotonic()
    cached = load_or_build(encoding.root, encoding.key(entry, content), build)
    seconds = f"encoded in {time.monotonic() - start:.1f} s"
    logger.info("%s: %s", entry.name, seconds if cached.is_new else "loaded from the cache")
    report = report_from(cached.report, entry.name, entry.source.remarks)
    if len(report.broken) > section.max_broken_rows:
        raise too_many_broken(entry.name, report.broken, section.max_broken_rows)
    return _Loaded(cached.store, report, drawn)
