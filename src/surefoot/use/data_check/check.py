"""Read the rows of a recipe, dataset by dataset, to show or to check them. They are read once and
in batches, and only a few hashes of each are kept.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...data.data_order import Index, hold_out
from ...data.example import BrokenRow, Dropped, Encoded, Example, Truncated, items_of, unread_in
from ...data.media.files import seen_in
from ...data.rows.catalog import Catalog
from ...data.rows.registry import DatasetEntry
from ...data.rows.rows import read_examples
from ...data.text.codec import Codec
from ...data.training_data import DrawnRows, draw_rows
from ...errors import DataError
from ...recipe.recipe import Recipe
from ._rows import hashes_of, oddities, response_of
from .figures import (
    Counted,
    DataCheck,
    DatasetFigures,
    Overlap,
    Repeated,
    findings_of,
    num_limited,
    num_tokens_of,
    num_trained_of,
    preview_example,
)

logger = logging.getLogger(__name__)
BATCH = 500
UNLIMITED = 1 << 30
REPORT_SECONDS = 10.0


class _Reader:
    """Reads datasets and collects their figures, hashes of their rows, and the first examples."""

    def __init__(
        self, recipe: Recipe, codec: Codec, *, compares: bool = False, num_shown: int = 0
    ) -> None:
        self._recipe, self._codec, self._compares = recipe, codec, compares
        self._num_shown = num_shown
        self._digests: dict[str, str] = {}  # of pictures that were decoded, by path or ``_key``
        section = replace(recipe.data, cutoff_len=UNLIMITED, on_too_long="truncate")
        self._unlimited = codec.with_section(section)
        specials = (*codec.tokenizer.all_special_tokens, "<|im_start|>", "<|im_end|>")
        self._specials = [t for t in dict.fromkeys(map(str, specials)) if len(t) > 2]

    def read(
        self,
        entry: DatasetEntry,
        *,
        limit: int | None,
        chosen: Index | None = None,
        is_evaluation: bool = False,
    ) -> Reading:
        """Read and encode the rows of a dataset, at most ``limit``, or the ``chosen`` ones."""
        reading = Reading(DatasetFigures(entry.name, is_evaluation))
        reading.figures.remarks = list(entry.source.remarks)
        most = entry.limit(self._recipe.data.max_samples) if chosen is None else None
        rows = read_examples(entry, max_samples=most, max_broken_rows=UNLIMITED, chosen=chosen)
        started = time.monotonic()
        limited_rows = islice(rows, limit)
        while batch := list(islice(limited_rows, BATCH)):
            self._add(reading, batch)
            if time.monotonic() - started > REPORT_SECONDS:
                started = time.monotonic()
                logger.info("reading %s: %d rows", entry.name, reading.figures.rows)
        reading.figures.all_rows = limit is None or next(rows, None) is None
        return reading

    def _add(self, reading: Reading, batch: Sequence[Example | BrokenRow]) -> None:
        figures = reading.figures
        figures.rows += len(batch)
        examples = []
        for row in batch:
            if isinstance(row, BrokenRow):
                origin = f"{figures.name}:{row.index}"
                if row.is_dropped:
                    figures.dropped.setdefault(row.reason, Counted()).add(origin)
                else:
                    figures.broken.add(f"{origin}: {row.reason}")
                reading.num_rows = max(reading.num_rows, row.index + 1)
            elif not self._compares or self._decodes(figures, row):
                examples.append(row)
        wholes = self._recipe.stage.encode(examples, self._unlimited)
        outcomes = self._limited(examples, wholes)
        unread = unread_in(examples, [item for whole in wholes for item in items_of(whole)])
        figures.unread = list(dict.fromkeys((*figures.unread, *unread)))
        for example, whole, outcome in zip(examples, wholes, outcomes, strict=True):
            self._one(reading, example, whole, outcome)

    def _decodes(self, figures: DatasetFigures, example: Example) -> bool:
        """Whether each picture of a row can be decoded. Each file is, once; pixels are not kept."""
        bad = []
        for source in (each for message in example.messages for each in message.media if each):
            if self._codec.media is None or _key(source) in self._digests:
                continue  # rows with pictures stop this run where they are encoded
            try:
                seen = self._codec.media.files.look(source)
                self._codec.media.files.decode(seen)
                self._digests[_key(source)] = seen.digest
            except DataError as error:
                name = f"picture {source}: " if isinstance(source, str) else "picture: "
                bad.append(f"{example.origin}: {name}{str(error).removeprefix(name)}")
        figures.bad_pictures += bad
        return not bad

    def _by_content(self, example: Example) -> Example:
        """A row to compare, with digests in place of its pictures: names do not count."""
        messages = tuple(
            replace(each, media=tuple(self._digests.get(_key(m or "")) for m in each.media))
            for each in example.messages
        )
        return replace(example, messages=messages)

    def _limited(self, examples: Sequence[Example], wholes: Sequence[Encoded]) -> list[Encoded]:
        """The examples as they are trained on. Only long ones must be encoded again for it."""
        limit = self._codec.section.longest
        is_long = [any(num_limited(item) > limit for item in items_of(whole)) for whole in wholes]
        again = [e for e, long in zip(examples, is_long, strict=True) if long]
        encoded = iter(self._recipe.stage.encode(again, self._codec) if again else ())
        return [next(encoded) if long else w for w, long in zip(wholes, is_long, strict=True)]

    def _one(self, reading: Reading, example: Example, whole: Encoded, outcome: Encoded) -> None:
        figures, number = reading.figures, int(example.origin.rpartition(":")[2])
        reading.num_rows = max(reading.num_rows, number + 1)
        items = items_of(outcome)
        if items:
            reading.usable.append(number)
        if isinstance(outcome, Dropped):
            figures.dropped.setdefault(outcome.reason, Counted()).add(example.origin)
        if isinstance(outcome, Truncated):
            figures.cut.add(example.origin)
        for note in example.notes:
            figures.notes.setdefault(note, Counted()).add(example.origin)
        figures.items += len(items)
        figures.tokens += sum(map(num_tokens_of, items))
        figures.trained_tokens += sum(map(num_trained_of, items))
        figures.pictures.update(seen[2:] for item in items for seen in seen_in(item))
        figures.lengths.update(map(num_limited, items_of(whole)))
        if example.label is not None:
            figures.labels[example.label] += 1
        stage = self._recipe.stage
        needs = stage.uses_template and not stage.max_new_tokens
        for what in oddities(example, self._specials, needs_response=needs):
            figures.odd.setdefault(what, Counted()).add(example.origin)
        if self._num_shown:
            figures.show(preview_example(self._codec, example, outcome, whole), self._num_shown)
        if self._compares:
            reading.compare(self._by_content(example), number)


def _key(source: str | bytes) -> str:
    return source if isinstance(source, str) else xxhash.xxh3_128_hexdigest(source)


def preview_data(
    recipe: Recipe,
    codec: Codec,
    *,
    dataset: str | None = None,
    count: int = 3,
    limit: int | None = None,
) -> list[DatasetFigures]:
    """The rows of each dataset of a recipe, or of one ``dataset``: the first ``limit``, and
    ``count`` of them as examples. Nothing is written to the cache. Raises ``DataError``."""
    catalog, reader = Catalog(recipe.data), _Reader(recipe, codec, num_shown=count)
    configured = map(str, (*recipe.data.datasets, *recipe.data.eval_datasets))
    names = dict.fromkeys([dataset] if dataset else configured)
    return [reader.read(catalog.entry(name), limit=limit).figures for name in names]


def check_data(
    recipe: Recipe, codec: Codec, *, dataset: str | None = None, limit: int | None = None
) -> DataCheck:
    """Check the datasets of a recipe, or one ``dataset``, at most ``limit`` rows of each. Nothing
    is written to the cache. Raises ``DataError``: a dataset cannot be read at all."""
    section, catalog = recipe.data, Catalog(recipe.data)
    names = [str(name) for name in (*section.datasets, *section.eval_datasets)]
    checked_names = dict.fromkeys([dataset] if dataset else names)
    entries = [catalog.entry(name) for name in checked_names]
    drawn: Mapping[str, DrawnRows] = {}
    if not section.streaming:
        every = [catalog.entry(name) for name in names]
        drawn = draw_rows(every, max_samples=section.max_samples, seed=recipe.train.seed)
    reader, readings = _Reader(recipe, codec, compares=True), []
    for entry in entries:
        chosen = drawn[entry.name].distinct if entry.name in drawn else None
        is_evaluation = entry.name not in section.datasets
        reading = reader.read(entry, limit=limit, chosen=chosen, is_evaluation=is_evaluation)
        if chosen is not None:
            reading.num_rows = drawn[entry.name].num_rows
        _equal_rows(reading)
        _repeated(reading)
        readings.append(reading)
    overlaps, figures = _overlaps(recipe, readings), [reading.figures for reading in readings]
    findings = findings_of(section, figures, overlaps)
    return DataCheck(codec.section.longest, figures, overlaps, findings)


SNIPPETS, SNIPPET = 5000, 80  # responses that are remembered, and their characters
MOST_REPEATED, AT_LEAST = 3, 3  # responses that are reported, and rows that have them
HELD_OUT = "held out by val_size"
Mask = NDArray[np.bool_]


def _hashes() -> array[int]:
    return array("Q")


def _numbers() -> array[int]:
    return array("q")


@dataclass
class Reading:
    """A dataset while it is read, with the hashes of its rows in order."""

    figures: DatasetFigures
    whole: array[int] = field(default_factory=_hashes)
    prompt: array[int] = field(default_factory=_hashes)
    response: array[int] = field(default_factory=_hashes)
    numbers: array[int] = field(default_factory=_numbers)  # of these rows in the dataset
    usable: array[int] = field(default_factory=_numbers)  # rows with items
    num_rows: int = 0  # row numbers are below this
    snippets: dict[int, str] = field(default_factory=dict)  # by the place among the hashes

    def compare(self, example: Example, number: int) -> None:
        """Keep the hashes of a row, and the beginning of its response."""
        response, place = response_of(example), len(self.numbers)
        if response is not None and len(self.snippets) < SNIPPETS:
            self.snippets[place] = response.content[:SNIPPET]
        self.numbers.append(number)
        for hashes, value in zip(
            (self.whole, self.prompt, self.response), hashes_of(example), strict=True
        ):
            hashes.append(value)

    def name_of(self, place: int) -> str:
        """The dataset and the number of a row, for people."""
        return f"{self.figures.name}:{self.numbers[place]}"


def _overlaps(recipe: Recipe, readings: Sequence[Reading]) -> list[Overlap]:
    """The rows of each evaluation set that occur in the training data."""
    training = [reading for reading in readings if not reading.figures.is_evaluation]
    held_out = _held_out(recipe, training)
    trained = [(reading, ~out) for reading, out in zip(training, held_out, strict=True)]
    empty = np.empty(0, np.uint64)  # concatenate refuses a list without arrays
    whole = np.concatenate([empty, *(_array(r.whole)[mask] for r, mask in trained)])
    prompt = np.concatenate([empty, *(_array(r.prompt)[mask] for r, mask in trained)])
    if not len(whole):
        return []
    every = [(r, np.ones(len(r.numbers), np.bool_)) for r in readings if r.figures.is_evaluation]
    sets = {reading.figures.name: [(reading, mask)] for reading, mask in every}
    if any(out.any() for out in held_out):
        sets[HELD_OUT] = list(zip(training, held_out, strict=True))
    overlaps = []
    for name, parts in sets.items():
        overlap = Overlap(name, sum(int(mask.sum()) for _, mask in parts))
        for reading, mask in parts:
            is_same = mask & np.isin(_array(reading.whole), whole)
            has_prompt = mask & ~is_same & np.isin(_array(reading.prompt), prompt)
            for counted, places in ((overlap.same, is_same), (overlap.prompt, has_prompt)):
                for place in np.flatnonzero(places).tolist():
                    counted.add(reading.name_of(place))
        overlaps.append(overlap)
    return overlaps


def _held_out(recipe: Recipe, training: Sequence[Reading]) -> list[Mask]:
    """Which rows of each training dataset ``val_size`` holds out; none where that is not known."""
    none = [np.zeros(len(reading.numbers), np.bool_) for reading in training]
    section = recipe.data
    are_all = all(r.figures.all_rows for r in training) and len(training) == len(section.datasets)
    if not section.val_size or section.streaming or not are_all:
        return none
    starts = np.cumsum([0, *(reading.num_rows for reading in training)])
    pairs = list(zip(training, starts[:-1], strict=True))
    usable = np.concatenate([np.array(r.usable, np.int64) + start for r, start in pairs])
    try:
        is_held = hold_out(
            usable, num_rows=int(starts[-1]), val_size=section.val_size, seed=recipe.train.seed
        )
    except DataError:  # it would leave nothing to train on, which training reports
        return none
    held_out_rows = usable[is_held]
    return [np.isin(np.array(r.numbers, np.int64) + start, held_out_rows) for r, start in pairs]


def _array(hashes: array[int]) -> NDArray[np.uint64]:
    return np.array(hashes, np.uint64)


def _equal_rows(reading: Reading) -> None:
    """Count the rows that are equal to an earlier one of their dataset."""
    _, first, which = np.unique(_array(reading.whole), return_index=True, return_inverse=True)
    origin = first[which]
    for place in np.flatnonzero(origin != np.arange(len(origin))).tolist():
        reading.figures.equal.add(f"{reading.name_of(place)} is {reading.name_of(origin[place])}")


def _repeated(reading: Reading) -> None:
    """The responses that most rows have."""
    if not reading.snippets:
        return
    _, first, counts = np.unique(_array(reading.response), return_index=True, return_counts=True)
    for at in np.argsort(-counts, kind="stable")[:MOST_REPEATED].tolist():
        place = int(first[at])
        text = reading.snippets.get(place, "")
        if counts[at] >= AT_LEAST and (text.strip() or place not in reading.snippets):
            repeated = Repeated(int(counts[at]), text, reading.name_of(place))
            reading.figures.repeated.append(repeated)
