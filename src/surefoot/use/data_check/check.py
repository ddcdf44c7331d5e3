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
from numpy.typing import NDArray

from ...data.data_order import Index, hold_out
from ...data.example import Dropped, Encoded, Example, Truncated, items_of
from ...data.rows.catalog import Catalog
from ...data.rows.registry import DatasetEntry
from ...data.rows.row_sources import BrokenRow
from ...data.rows.rows import read_examples
from ...data.store.shards import unread_in
from ...data.text.codec import Codec
from ...data.training_data import DrawnRows, draw_rows
from ...errors import DataError
from ...recipe.recipe import Recipe
from ._rows import Hashes, RowHashes, oddities, repeats, response_of, texts_of
from .figures import Counted, DataCheck, DatasetFigures, Overlap, Repeated, findings_of
from .preview import num_limited, num_tokens_of, num_trained_of, preview_example

logger = logging.getLogger(__name__)
BATCH = 500
UNLIMITED = 1 << 30
REPORT_SECONDS = 10.0


class _Reader:
    """Reads datasets and collects their figures, hashes of their rows, and the first examples."""

    def __init__(
        self, recipe: Recipe, codec: Codec, hashes: RowHashes | None = None, num_shown: int = 0
    ) -> None:
        self._recipe, self._codec, self._hashes = recipe, codec, hashes
        self._num_shown = num_shown
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
        reading = Reading(DatasetFigures(entry.name, is_evaluation), len(self._hashes or ()))
        reading.figures.remarks = list(entry.source.remarks)
        most = entry.limit(self._recipe.data.max_samples) if chosen is None else None
        rows = read_examples(entry, max_samples=most, max_broken_rows=UNLIMITED, chosen=chosen)
        started = time.monotonic()
        wanted = islice(rows, limit)
        while batch := list(islice(wanted, BATCH)):
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
            else:
                examples.append(row)
        wholes = self._recipe.stage.encode(examples, self._unlimited)
        outcomes = self._limited(examples, wholes)
        unread = unread_in(examples, [item for whole in wholes for item in items_of(whole)])
        figures.unread = list(dict.fromkeys((*figures.unread, *unread)))
        for example, whole, outcome in zip(examples, wholes, outcomes, strict=True):
            self._one(reading, example, whole, outcome)

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
        figures.lengths.update(map(num_limited, items_of(whole)))
        if example.label is not None:
            figures.labels[example.label] += 1
        stage = self._recipe.stage
        needs = stage.uses_template and not stage.max_new_tokens
        for what in oddities(example, self._specials, needs_response=needs):
            figures.odd.setdefault(what, Counted()).add(example.origin)
        if self._num_shown:
            figures.show(preview_example(self._codec, example, outcome, whole), self._num_shown)
        if self._hashes is not None:
            _compare(self._hashes, reading, example, number)


def _compare(hashes: RowHashes, reading: Reading, example: Example, number: int) -> None:
    """Keep the hashes of a row, and the beginning of its response."""
    response, place = response_of(example), len(hashes)
    hashes.add(texts_of(example))
    reading.numbers.append(number)
    if response is not None and len(reading.snippets) < SNIPPETS:
        reading.snippets[place] = response.content[:SNIPPET]


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
    known = map(str, (*recipe.data.datasets, *recipe.data.eval_datasets))
    names = dict.fromkeys([dataset] if dataset else known)
    return [reader.read(catalog.entry(name), limit=limit).figures for name in names]


def check_data(
    recipe: Recipe, codec: Codec, *, dataset: str | None = None, limit: int | None = None
) -> DataCheck:
    """Check the datasets of a recipe, or one ``dataset``, at most ``limit`` rows of each. Nothing
    is written to the cache. Raises ``DataError``: a dataset cannot be read at all."""
    section, catalog = recipe.data, Catalog(recipe.data)
    names = [str(name) for name in (*section.datasets, *section.eval_datasets)]
    wanted = dict.fromkeys([dataset] if dataset else names)
    entries = [catalog.entry(name) for name in wanted]
    drawn: Mapping[str, DrawnRows] = {}
    if not section.streaming:
        every = [catalog.entry(name) for name in names]
        drawn = draw_rows(every, max_samples=section.max_samples, seed=recipe.train.seed)
    with RowHashes() as hashes:
        reader = _Reader(recipe, codec, hashes)
        readings = []
        for entry in entries:
            chosen = drawn[entry.name].distinct if entry.name in drawn else None
            is_evaluation = entry.name not in section.datasets
            reading = reader.read(entry, limit=limit, chosen=chosen, is_evaluation=is_evaluation)
            if chosen is not None:
                reading.num_rows = drawn[entry.name].num_rows
            readings.append(reading)
        overlaps = compared(recipe, readings, hashes)
    figures = [reading.figures for reading in readings]
    findings = findings_of(section, figures, overlaps)
    return DataCheck(codec.section.longest, figures, overlaps, findings)


SNIPPETS, SNIPPET = 5000, 80  # responses that are remembered, and their characters
MOST_REPEATED, AT_LEAST = 3, 3  # responses that are reported, and rows that have them
HELD_OUT = "held out by val_size"
Pairs = tuple[Index, Index]
Mask = NDArray[np.bool_]


def _integers() -> array[int]:
    return array("q")


@dataclass
class Reading:
    """A dataset while it is read, and afterwards where its rows are among all hashes."""

    figures: DatasetFigures
    start: int = 0
    numbers: array[int] = field(default_factory=_integers)  # [rows with a hash] row of the dataset
    usable: array[int] = field(default_factory=_integers)  # rows with items
    num_rows: int = 0  # row numbers are below this
    snippets: dict[int, str] = field(default_factory=dict)  # by the place among all hashes

    @property
    def end(self) -> int:
        """One past its last place among all hashes."""
        return self.start + len(self.numbers)

    def name_of(self, place: int) -> str:
        """The dataset and the number of a row, for people."""
        return f"{self.figures.name}:{self.numbers[place - self.start]}"


def compared(recipe: Recipe, readings: Sequence[Reading], hashes: RowHashes) -> list[Overlap]:
    """Count equal and similar rows of each dataset, and of training and evaluation data."""
    whole, response, similar = hashes.whole, hashes.response, hashes.similar()
    for reading in readings:
        _equal_rows(reading, whole)
        _similar_rows(reading, similar)
        _repeated(reading, response)
    sets = _evaluation_sets(recipe, readings)
    is_eval = np.zeros(len(hashes), np.bool_)
    for places in sets.values():
        is_eval[places] = True
    kept = [reading for reading in readings if not reading.figures.is_evaluation]
    is_trained = np.zeros(len(hashes), np.bool_)
    for reading in kept:
        is_trained[reading.start : reading.end] = True
    is_trained &= ~is_eval
    if not is_trained.any():
        return []
    return [
        _overlap(name, places, is_trained, hashes, similar, readings)
        for name, places in sets.items()
    ]


def _overlap(
    name: str,
    places: Index,
    is_trained: Mask,
    hashes: RowHashes,
    similar: Pairs,
    readings: Sequence[Reading],
) -> Overlap:
    found = Overlap(name, len(places))
    same = np.isin(hashes.whole[places], hashes.whole[is_trained])
    prompt = np.isin(hashes.prompt[places], hashes.prompt[is_trained]) & ~same
    first, second = similar
    inside = np.zeros(len(is_trained), np.bool_)
    inside[places] = True
    near = {*second[inside[second] & is_trained[first]].tolist()}
    near |= {*first[inside[first] & is_trained[second]].tolist()}
    near -= {*places[same].tolist()}
    for counted, which in (
        (found.same, places[same].tolist()),
        (found.prompt, places[prompt].tolist()),
        (found.similar, sorted(near)),
    ):
        for place in which:
            counted.add(_owner(readings, place).name_of(place))
    return found


def _evaluation_sets(recipe: Recipe, readings: Sequence[Reading]) -> dict[str, Index]:
    """The places of the rows of each evaluation set among all hashes."""
    found = {
        reading.figures.name: np.arange(reading.start, reading.end)
        for reading in readings
        if reading.figures.is_evaluation
    }
    kept = [reading for reading in readings if not reading.figures.is_evaluation]
    section = recipe.data
    is_known = all(r.figures.all_rows for r in kept) and len(kept) == len(section.datasets)
    if not section.val_size or section.streaming or not is_known:
        return found
    starts = np.cumsum([0, *(reading.num_rows for reading in kept)])
    usable = np.concatenate(
        [np.array(r.usable, np.int64) + s for r, s in zip(kept, starts, strict=False)]
    )
    try:
        is_held = hold_out(
            usable, num_rows=int(starts[-1]), val_size=section.val_size, seed=recipe.train.seed
        )
    except DataError:  # it would leave nothing to train on, which training reports
        return found
    held = usable[is_held]
    places = [
        r.start + np.flatnonzero(np.isin(np.array(r.numbers, np.int64) + s, held))
        for r, s in zip(kept, starts, strict=False)
    ]
    return {**found, HELD_OUT: np.concatenate(places)}


def _owner(readings: Sequence[Reading], place: int) -> Reading:
    return next(reading for reading in readings if reading.start <= place < reading.end)


def _equal_rows(reading: Reading, whole: Hashes) -> None:
    """Count the rows that are equal to an earlier one of their dataset."""
    again, first = repeats(whole[reading.start : reading.end])
    for place, origin in zip(again.tolist(), first.tolist(), strict=True):
        one, other = (reading.name_of(reading.start + at) for at in (place, origin))
        reading.figures.equal.add(f"{one} is {other}")


def _similar_rows(reading: Reading, similar: Pairs) -> None:
    """Count the rows that are similar to an earlier one of their dataset."""
    first, second = similar
    inside = (first >= reading.start) & (second < reading.end)
    seen: set[int] = set()
    for origin, place in zip(first[inside].tolist(), second[inside].tolist(), strict=True):
        if place not in seen:
            seen.add(place)
            one, other = reading.name_of(place), reading.name_of(origin)
            reading.figures.similar.add(f"{one} resembles {other}")


def _repeated(reading: Reading, response: Hashes) -> None:
    """The responses that most rows have."""
    if not len(reading.snippets):
        return
    _, first, counts = np.unique(
        response[reading.start : reading.end], return_index=True, return_counts=True
    )
    for at in np.argsort(-counts, kind="stable")[:MOST_REPEATED].tolist():
        place = reading.start + int(first[at])
        text = reading.snippets.get(place, "")
        if counts[at] >= AT_LEAST and (text.strip() or place not in reading.snippets):
            found = Repeated(int(counts[at]), text, reading.name_of(place))
            reading.figures.repeated.append(found)
