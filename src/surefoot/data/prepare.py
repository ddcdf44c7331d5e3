"""From the recipe's ``data`` section to encoded datasets, through the cache.

Each dataset is encoded by itself, so another mix, split or order finds it in the cache.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import xxhash

from ..batch import IGNORE_INDEX, Features
from ..errors import DataError
from . import cache
from .cache import Writer, default_folder, load_or_build
from .dataset import EncodedDataset, Store, join
from .encode import Cut, Dropped, Encoded
from .example import JSON, Example
from .mix import hold_out
from .registry import Entry, read_registry
from .report import DatasetReport, Report
from .rows import read_examples, too_many_broken
from .section import DataSection
from .sources import BrokenRow

logger = logging.getLogger(__name__)

VERSION = 1  # of what this module and the formats make of a row; part of the fingerprint
BATCH = 1000  # examples that are encoded together
REPORT_SECONDS = 10.0
ENCODING = ("template", "default_system", "cutoff_len", "on_too_long", "train_on_prompt")
SETTINGS = (*ENCODING, "mask_history", "max_samples")  # what the items of a dataset depend on

Encode = Callable[[Sequence[Example]], list[Encoded]]


@dataclass(frozen=True)
class Prepared:
    """What a run learns from, what it is evaluated on, and what became of every row."""

    train: EncodedDataset
    evals: Mapping[str, EncodedDataset]  # by dataset; "" for what val_size holds out
    report: Report


def prepare(
    section: DataSection, encode: Encode, *, fingerprint: Mapping[str, str], seed: int
) -> Prepared:
    """Encode the datasets of a recipe, or find them in the cache.

    Args:
        section: which datasets, from where, and how.
        encode: turns examples into features; one outcome per example.
        fingerprint: all that ``encode`` depends on beside ``section``: tokenizer, template, stage.
        seed: decides which rows ``val_size`` holds out.

    Raises:
        DataError: something is missing, broken, or gives nothing to learn.
    """
    entries = _entries(section)
    loaded = {entry.name: _load(entry, section, encode, fingerprint) for entry in entries}
    for name in set(section.datasets) & set(section.eval_datasets):
        logger.warning("dataset %r is learnt and evaluated on: its figures prove nothing", name)
    return _arranged(section, loaded, seed)


def find(section: DataSection, *, fingerprint: Mapping[str, str], seed: int) -> Prepared | None:
    """What ``prepare`` would find in the cache; None unless it holds all of it."""
    root, loaded = section.cache_dir or default_folder(), {}
    for entry in _entries(section):
        cached = cache.find(root, _key(entry, section, fingerprint, entry.source.content_hash()))
        if cached is None:
            return None
        loaded[entry.name] = _Loaded(cached.store, _report_from(cached.report, entry.name))
    return _arranged(section, loaded, seed)


def _entries(section: DataSection) -> list[Entry]:
    """Every dataset that a recipe names, once; a complaint about any comes before work on one."""
    registry = read_registry(section.dataset_dir)
    names = (*section.datasets, *section.eval_datasets)
    return [registry.entry(name) for name in dict.fromkeys(names)]


def _arranged(section: DataSection, loaded: Mapping[str, _Loaded], seed: int) -> Prepared:
    """Datasets put together to learn from and to evaluate on."""
    train = join([loaded[name].store for name in section.datasets])
    evals = {name: join([loaded[name].store]) for name in section.eval_datasets}
    if section.val_size:
        train, evals[""] = _split([loaded[name] for name in section.datasets], section, seed)
    reports = tuple(each.report for each in loaded.values())
    return Prepared(train, evals, Report(reports, len(evals.get("", ()))))


@dataclass(frozen=True)
class _Loaded:
    store: Store
    report: DatasetReport


def _split(
    parts: Sequence[_Loaded], section: DataSection, seed: int
) -> tuple[EncodedDataset, EncodedDataset]:
    """What to train on and what to hold out; all pieces of a row are on the same side."""
    starts = np.cumsum([0, *(part.report.rows for part in parts)])
    rows = [part.store.rows + start for part, start in zip(parts, starts, strict=False)]
    is_held = hold_out(
        np.concatenate(rows), num_rows=int(starts[-1]), val_size=section.val_size, seed=seed
    )
    whole = join([part.store for part in parts])
    train, held = np.flatnonzero(~is_held), np.flatnonzero(is_held)
    return EncodedDataset(whole.stores, train), EncodedDataset(whole.stores, held)


def _load(
    entry: Entry, section: DataSection, encode: Encode, fingerprint: Mapping[str, str]
) -> _Loaded:
    content = entry.source.content_hash()
    key = _key(entry, section, fingerprint, content)

    def build(writer: Writer) -> JSON:
        report = _Encoder(entry, section, encode, writer).run()
        if entry.source.content_hash() != content:
            raise DataError(f"dataset {entry.name!r}: {entry.source} was changed while it was read")
        return asdict(report)

    start = time.monotonic()
    cached = load_or_build(section.cache_dir or default_folder(), key, build)
    seconds = f"encoded in {time.monotonic() - start:.1f} s"
    logger.info("%s: %s", entry.name, seconds if cached.is_new else "found in the cache")
    report = _report_from(cached.report, entry.name)
    if len(report.broken) > section.max_broken_rows:
        raise too_many_broken(entry, report.broken, section.max_broken_rows)
    return _Loaded(cached.store, report)


def _key(entry: Entry, section: DataSection, fingerprint: Mapping[str, str], content: str) -> str:
    """The fingerprint of everything that the encoded dataset depends on."""
    settings = {name: str(getattr(section, name)) for name in SETTINGS}
    parts = [VERSION, entry.describe(), content, settings, dict(fingerprint)]
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())


def _report_from(saved: JSON, name: str) -> DatasetReport:
    fields: dict[str, Any] = dict(saved)
    broken = tuple(BrokenRow(**row) for row in fields["broken"])
    return DatasetReport(**{**fields, "broken": broken, "name": name})


@dataclass
class _Encoder:
    """Encodes one dataset into a Writer and counts what comes of its rows."""

    entry: Entry
    section: DataSection
    encode: Encode
    writer: Writer
    rows: int = 0
    cut: int = 0
    items: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    broken: list[BrokenRow] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    def run(self) -> DatasetReport:
        """Encode all rows; raises DataError if nothing comes of them."""
        limits = self.section.max_samples, self.section.max_broken_rows
        rows = read_examples(self.entry, max_samples=limits[0], max_broken_rows=limits[1])
        start = told = time.monotonic()
        while batch := list(islice(rows, BATCH)):
            self._add(batch)
            if time.monotonic() - told > REPORT_SECONDS:
                told = time.monotonic()
                speed = self.tokens / (told - start)
                text = "encoding %s: %d rows, %.0f tokens/s"
                logger.info(text, self.entry.name, self.rows, speed)
        if not self.items:
            raise self._nothing()
        return DatasetReport(
            name=self.entry.name,
            rows=self.rows,
            broken=tuple(self.broken),
            dropped=dict(self.dropped.most_common()),
            cut=self.cut,
            items=self.items,
            tokens=self.tokens,
            trained_tokens=self.trained_tokens,
        )

    def _add(self, batch: Sequence[Example | BrokenRow]) -> None:
        numbered = list(enumerate(batch, self.rows))
        self.rows += len(batch)
        self.broken += [row for row in batch if isinstance(row, BrokenRow)]
        examples = [(i, row) for i, row in numbered if isinstance(row, Example)]
        outcomes = self.encode([example for _, example in examples])
        items: list[Features] = []
        rows: list[int] = []
        for (index, _), outcome in zip(examples, outcomes, strict=True):
            found = self._features(outcome)
            items += found
            rows += [index] * len(found)
        self.writer.add(items, rows)
        self._count(items)

    def _features(self, outcome: Encoded) -> Sequence[Features]:
        if isinstance(outcome, Dropped):
            self.dropped[outcome.reason] += 1
            return ()
        if isinstance(outcome, Cut):
            self.cut += 1
            return outcome.features
        return outcome

    def _count(self, items: Sequence[Features]) -> None:
        self.items += len(items)
        for item in items:
            for name, values in item.items():
                if name.endswith("input_ids"):
                    self.tokens += len(values)
                elif name.endswith("labels"):  # nothing predicts the first token
                    ignored = list(values[1:]).count(IGNORE_INDEX)
                    self.trained_tokens += max(len(values) - 1, 0) - ignored

    def _nothing(self) -> DataError:
        reasons = "; ".join(f"{reason} ({count:,})" for reason, count in self.dropped.most_common())
        return DataError(
            f"dataset {self.entry.name!r}: none of its {self.rows:,} rows gives anything to learn: "
            f"{reasons or 'all are broken'}"
        )
