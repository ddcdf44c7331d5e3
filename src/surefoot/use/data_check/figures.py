"""The figures of a check: of each dataset, and of the overlap of training and evaluation data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

ROWS_SHOWN = 3  # of each kind, by name
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
            "datasets": [_plain(figures) for figures in self.datasets],
            "overlaps": [
                {**vars(o), **{k: vars(v) for k, v in vars(o).items() if isinstance(v, Counted)}}
                for o in self.overlaps
            ],
            "findings": [vars(finding) for finding in self.findings],
        }


def _plain(figures: DatasetFigures) -> Mapping[str, object]:
    named = {name: vars(v) for name, v in vars(figures).items() if isinstance(v, Counted)}
    return {
        **vars(figures),
        **named,
        "dropped": {reason: vars(each) for reason, each in figures.dropped.items()},
        "odd": {what: vars(each) for what, each in figures.odd.items()},
        "repeated": [vars(each) for each in figures.repeated],
        "labels": {str(value).lower(): count for value, count in figures.labels.items()},
        "lengths": {str(length): figures.lengths[length] for length in sorted(figures.lengths)},
        "quantiles": {f"{share:g}": n for share, n in figures.quantiles().items()},
        "share_trained": figures.share_trained,
    }
