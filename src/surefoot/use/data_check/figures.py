"""The figures of a check: of each dataset, and of the overlap of training and evaluation data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from ...errors import counted
from ..preview import PreviewExample
from .conversations import FIRST, NO_END

ROWS_SHOWN = 3  # of each kind, by name
TURNS = (NO_END, FIRST)  # what a preview says of turns that are omitted, or have no question
QUANTILES = (0.5, 0.9, 0.95, 0.99, 1.0)
Level = Literal["problem", "note"]


@dataclass(frozen=True)
class Finding:
    """Something to look at: a problem sets the exit code, a note does not."""

    level: Level
    dataset: str
    what: str
    count: int
    rows: Sequence[str] = ()  # some of them
    advice: str = ""


@dataclass
class Counted:
    """How many rows have a property, and the first few of them."""

    count: int = 0
    rows: list[str] = field(default_factory=list)

    def add(self, row: str) -> None:
        """Count one more."""
        self.count += 1
        if len(self.rows) < ROWS_SHOWN:
            self.rows.append(row)


@dataclass
class Repeated:
    """One response that many rows have."""

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
    broken: Counted = field(default_factory=Counted)
    cut: Counted = field(default_factory=Counted)
    dropped: dict[str, Counted] = field(default_factory=dict)  # by reason
    odd: dict[str, Counted] = field(default_factory=dict)  # by what is odd
    remarks: list[str] = field(default_factory=list)  # on how its source is read
    notes: dict[str, Counted] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)  # columns that nothing reads
    labels: Counter[bool] = field(default_factory=Counter)  # of kto
    equal: Counted = field(default_factory=Counted)  # to an earlier row
    similar: Counted = field(default_factory=Counted)
    repeated: list[Repeated] = field(default_factory=list)
    shown: list[PreviewExample] = field(default_factory=list)  # of a preview

    @property
    def totals(self) -> list[str]:
        """Rows, sequences and tokens, for people."""
        first = "" if self.all_rows else "the first "
        return [
            f"{first}{counted(self.rows, 'row')}",
            counted(self.items, "sequence"),
            counted(self.tokens, "token"),
            f"{self.trained_tokens:,} trained",
        ]

    def warnings(self) -> Iterator[str]:
        """What was not read, or not as it is; nothing if all is well."""
        yield from self.remarks
        if self.broken.count:
            found = counted(self.broken.count, "row")
            yield f"{found} cannot be read, such as {self.broken.rows[0]}"
        for reason, dropped in sorted(self.dropped.items(), key=lambda item: -item[1].count):
            yield f"{counted(dropped.count, 'example')} dropped: {reason}"
        if self.unread:
            yield f"columns that nothing reads: {', '.join(self.unread)}"
        turns = {what: self.odd[what] for what in TURNS if what in self.odd}
        for note, examples in {**self.notes, **turns}.items():
            yield f"{counted(examples.count, 'example')}: {note}"
        if self.cut.count:
            yield f"{counted(self.cut.count, 'example')} truncated to data.cutoff_len"

    def show(self, example: PreviewExample, count: int) -> None:
        """Keep the first ``count`` examples; one that is dropped makes room for one that is not."""
        dropped = next((each for each in self.shown if each.dropped), None)
        if len(self.shown) == count and dropped and not example.dropped:
            self.shown.remove(dropped)
        if len(self.shown) < count:
            self.shown.append(example)

    def as_data(self) -> dict[str, object]:
        """All of it as plain data."""
        return {
            **asdict(self),
            "labels": {str(value).lower(): count for value, count in self.labels.items()},
            "lengths": {str(length): self.lengths[length] for length in sorted(self.lengths)},
            "quantiles": {f"{share:g}": n for share, n in self.quantiles().items()},
            "share_trained": self.share_trained,
        }

    @property
    def share_trained(self) -> float:
        """Of all tokens, those that are trained on."""
        return self.trained_tokens / self.tokens if self.tokens else 0.0

    def quantiles(self) -> Mapping[float, int]:
        """Tokens that this share of sequences does not exceed."""
        total, seen, found = self.lengths.total(), 0, dict[float, int]()
        for length in sorted(self.lengths):
            seen += self.lengths[length]
            for share in QUANTILES:
                if share not in found and seen >= share * total:
                    found[share] = length
        return found


@dataclass
class Overlap:
    """Rows of an evaluation set that occur in the training data."""

    evaluation: str
    rows: int
    same: Counted = field(default_factory=Counted)  # the complete row
    prompt: Counted = field(default_factory=Counted)  # the prompt, with another response
    similar: Counted = field(default_factory=Counted)


@dataclass(frozen=True)
class DataCheck:
    """All figures of a check."""

    cutoff_len: int
    datasets: Sequence[DatasetFigures]
    overlaps: Sequence[Overlap]
    findings: Sequence[Finding]

    @property
    def has_problems(self) -> bool:
        """Whether a finding is a problem."""
        return any(finding.level == "problem" for finding in self.findings)

    def as_data(self) -> Mapping[str, object]:
        """All of it as plain data."""
        return {
            "ok": not self.has_problems,
            "cutoff_len": self.cutoff_len,
            "datasets": [{**each.as_data(), "shown": []} for each in self.datasets],
            "overlaps": [asdict(overlap) for overlap in self.overlaps],
            "findings": [asdict(finding) for finding in self.findings],
        }
