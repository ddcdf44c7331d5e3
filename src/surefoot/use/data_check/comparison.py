"""Compare the rows of all datasets: equal and similar ones, repeated responses, and the overlap of
training and evaluation data."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...data.data_order import Index, hold_out
from ...errors import DataError
from ...recipe.recipe import Recipe
from .duplicates import Hashes, RowHashes, repeats
from .figures import DatasetFigures, Overlap, Repeated

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
