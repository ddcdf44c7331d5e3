"""The figures of one dataset: its rows, sequences, tokens and pictures, and the lengths in bins.

``check`` counts them while it reads, ``findings`` judges them, and the commands ``preview`` and
``data check`` print them. The names of the fields are the keys of their JSON.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import NamedTuple

from ...batch import Features
from ...data.example import Dropped, Encoded, Example, Truncated, items_of
from ...data.media.files import seen_in
from ...data.text.collation import num_trained
from ...data.text.preview import PreviewExample
from ...errors import counted

ROWS_SHOWN = 3  # of each kind, by name


@dataclass
class CountedRows:
    """How many rows have a property, and the first few of them."""

    count: int = 0
    rows: list[str] = field(default_factory=list)

    def add(self, row: str) -> None:
        """Count one more."""
        self.count += 1
        if len(self.rows) < ROWS_SHOWN:
            self.rows.append(row)


class PictureSize(NamedTuple):
    """The pixels of a picture, and the tokens that it takes the place of."""

    width: int
    height: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.width} x {self.height}"


@dataclass
class RepeatedResponse:
    """A response that many rows have."""

    count: int
    text: str
    row: str  # the first one


@dataclass
class DatasetFigures:
    """What is known about the rows of one dataset."""

    name: str
    is_evaluation: bool = False
    rows: int = 0
    all_rows: bool = True  # whether the dataset has no more
    items: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    lengths: Counter[int] = field(default_factory=Counter)  # tokens of a sequence -> sequences
    pictures: Counter[PictureSize] = field(default_factory=Counter)
    bad_pictures: list[str] = field(default_factory=list)  # all of them, by row and name
    broken: CountedRows = field(default_factory=CountedRows)
    max_broken_rows: int = 0  # with more of them, training stops
    cut: CountedRows = field(default_factory=CountedRows)
    dropped: dict[str, CountedRows] = field(default_factory=dict)  # by reason
    odd: dict[str, CountedRows] = field(default_factory=dict)  # by what is odd
    remarks: list[str] = field(default_factory=list)  # on how its source is read
    notes: dict[str, CountedRows] = field(default_factory=dict)
    unread: dict[str, CountedRows] = field(default_factory=dict)  # keys that nothing reads
    labels: Counter[bool] = field(default_factory=Counter)  # of kto
    equal: CountedRows = field(default_factory=CountedRows)  # to an earlier row
    repeated: list[RepeatedResponse] = field(default_factory=list)
    shown: list[PreviewExample] = field(default_factory=list)  # of a preview

    def add(self, example: Example, outcome: Encoded, untruncated: Encoded) -> None:
        """Count an example by its ``outcome`` of encoding, and by the one without a limit."""
        items = items_of(outcome)
        self.items += len(items)
        self.tokens += sum(len(item["input_ids"]) for item in items)
        self.trained_tokens += sum(map(num_trained, items))
        self.lengths.update(map(num_limited, items_of(untruncated)))
        pictures = (picture for item in items for picture in seen_in(item))
        self.pictures.update(PictureSize(p.width, p.height, p.tokens) for p in pictures)
        if example.label is not None:
            self.labels[example.label] += 1
        if isinstance(outcome, Truncated):
            self.cut.add(example.origin)
        if isinstance(outcome, Dropped):
            self.dropped.setdefault(outcome.reason, CountedRows()).add(example.origin)
        for note in example.notes:
            self.notes.setdefault(note, CountedRows()).add(example.origin)

    def show(self, example: PreviewExample, count: int) -> None:
        """Keep the first ``count`` examples; one that is dropped makes room for one that is not."""
        dropped = next((shown for shown in self.shown if shown.dropped), None)
        if len(self.shown) == count and dropped and not example.dropped:
            self.shown.remove(dropped)
        if len(self.shown) < count:
            self.shown.append(example)

    @property
    def share_trained(self) -> float:
        """Of all tokens, those that are trained on."""
        return self.trained_tokens / self.tokens if self.tokens else 0.0

    @property
    def totals(self) -> list[str]:
        """Rows, sequences, tokens and pictures, for people."""
        first = "" if self.all_rows else "the first "
        return [
            f"{first}{counted(self.rows, 'row')}",
            counted(self.items, "sequence"),
            counted(self.tokens, "token"),
            f"{self.trained_tokens:,} trained",
            *([self._picture_totals()] if self.pictures else ()),
        ]

    def _picture_totals(self) -> str:
        """Such as ``3 pictures of 64 x 64 to 96 x 128 pixels (12 tokens, 2 to 4 each)``."""

        def area(size: PictureSize) -> int:
            return size.width * size.height

        smallest, largest = min(self.pictures, key=area), max(self.pictures, key=area)
        fewest, most = (end(size.tokens for size in self.pictures) for end in (min, max))
        sizes = " to ".join(dict.fromkeys((str(smallest), str(largest))))
        tokens_of_each = " to ".join(dict.fromkeys((str(fewest), str(most))))
        num_tokens = sum(size.tokens * count for size, count in self.pictures.items())
        pictures = counted(self.pictures.total(), "picture")
        return f"{pictures} of {sizes} pixels ({num_tokens:,} tokens, {tokens_of_each} each)"

    def as_data(self) -> dict[str, object]:
        """All of it as plain data."""
        # JSON has only strings as keys, so asdict's counters are replaced.
        return {
            **asdict(self),
            "labels": {str(value).lower(): count for value, count in self.labels.items()},
            "lengths": {str(length): self.lengths[length] for length in sorted(self.lengths)},
            "pictures": [
                {**size._asdict(), "count": count} for size, count in sorted(self.pictures.items())
            ],
            "quantiles": {f"{share:g}": n for share, n in quantiles(self.lengths).items()},
            "share_trained": self.share_trained,
        }


def num_limited(item: Features) -> int:
    """The tokens that ``cutoff_len`` limits: of a pair, the prompt with its longer response."""
    if "lengths" not in item:
        return len(item["input_ids"])
    prompt, *responses = (int(length) for length in item["lengths"])
    return prompt + max(responses)


QUANTILES = (0.5, 0.9, 0.95, 0.99, 1.0)
BINS = 8  # up to cutoff_len


def quantiles(lengths: Counter[int]) -> Mapping[float, int]:
    """Tokens that each of ``QUANTILES``, shares of all sequences, does not exceed."""
    total, num_sequences, length_at_share = lengths.total(), 0, dict[float, int]()
    for length in sorted(lengths):
        num_sequences += lengths[length]
        for share in QUANTILES:
            if share not in length_at_share and num_sequences >= share * total:
                length_at_share[share] = length
    return length_at_share


@dataclass(frozen=True)
class LengthBin:
    """The sequences with more than ``above`` tokens, and at most ``most``."""

    above: int
    most: int
    count: int


def length_bins(lengths: Mapping[int, int], cutoff_len: int) -> list[LengthBin]:
    """Eight bins of equal width up to ``cutoff_len`` and up to three more beyond it, from twice
    ``cutoff_len`` on doubled, the last up to the longest."""
    if not lengths:
        return []
    longest = max(lengths)
    limit = min(longest, cutoff_len)
    edges = {limit * i // BINS for i in range(1, BINS + BINS // 2)}
    if limit:
        edges |= {limit << power for power in range(1, (longest // limit).bit_length())}
    # A limit below eight tokens makes edges of 0, and the last steps may pass the longest.
    uppers = sorted({edge for edge in edges if 0 < edge < longest} | {longest})
    counts: Counter[int] = Counter()
    for length, count in lengths.items():
        counts[bisect_left(uppers, length)] += count
    bounds = pairwise([0, *uppers])
    return [LengthBin(above, most, counts[i]) for i, (above, most) in enumerate(bounds)]
