"""What a check or a preview knows of datasets: their figures, what is to be looked at in them, the
overlap of training and evaluation data, and rendered examples with their labels."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Literal

from ...batch import IGNORE_INDEX, Features
from ...data.example import Dropped, Encoded, Example, Truncated, items_of
from ...data.media.files import Seen, seen_in
from ...data.section import DataSection
from ...data.text.codec import Codec
from ...errors import counted
from ._rows import ALONE, CONTROL, ECHO, FIRST, LATE, LOOP, NO_END, PLACEHOLDER, TWICE

ROWS_SHOWN = 3  # of each kind, by name
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

    def __str__(self) -> str:
        rows = f" ({'; '.join(self.rows)})" if self.rows else ""
        advice = f". {self.advice[:1].upper()}{self.advice[1:]}" if self.advice else ""
        return f"{self.what}: {self.count:,}{rows}{advice}"


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
    pictures: Counter[tuple[int, int, int]] = field(
        default_factory=Counter
    )  # width, height, tokens
    bad_pictures: list[str] = field(default_factory=list)  # all of them, by row and name
    broken: Counted = field(default_factory=Counted)
    cut: Counted = field(default_factory=Counted)
    dropped: dict[str, Counted] = field(default_factory=dict)  # by reason
    odd: dict[str, Counted] = field(default_factory=dict)  # by what is odd
    remarks: list[str] = field(default_factory=list)  # on how its source is read
    notes: dict[str, Counted] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)  # columns that nothing reads
    labels: Counter[bool] = field(default_factory=Counter)  # of kto
    equal: Counted = field(default_factory=Counted)  # to an earlier row
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
            *self._of_pictures(),
        ]

    def _of_pictures(self) -> Iterator[str]:
        """The number of pictures, their sizes and tokens."""
        if self.pictures:
            small, large = (most(self.pictures, key=_area) for most in (min, max))
            sizes = " to ".join(dict.fromkeys(f"{w} x {h}" for w, h, _ in (small, large)))
            each = dict.fromkeys(most(n for _, _, n in self.pictures) for most in (min, max))
            count, total = self.pictures.total(), sum(n * c for (*_, n), c in self.pictures.items())
            tokens = f"{total:,} tokens, {' to '.join(map(str, each))} each"
            yield f"{counted(count, 'picture')} of {sizes} pixels ({tokens})"

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
            "pictures": [
                {"width": width, "height": height, "tokens": tokens, "count": count}
                for (width, height, tokens), count in sorted(self.pictures.items())
            ],
            "quantiles": {f"{share:g}": n for share, n in quantiles(self.lengths).items()},
            "share_trained": self.share_trained,
        }

    @property
    def share_trained(self) -> float:
        """Of all tokens, those that are trained on."""
        return self.trained_tokens / self.tokens if self.tokens else 0.0


def _area(picture: tuple[int, int, int]) -> int:
    return picture[0] * picture[1]


@dataclass
class Overlap:
    """Rows of an evaluation set that occur in the training data."""

    evaluation: str
    rows: int
    same: Counted = field(default_factory=Counted)  # the complete row
    prompt: Counted = field(default_factory=Counted)  # the prompt, with another response


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


FEW_EQUAL, FEW_CUT = 0.01, 0.05  # shares up to which these are only noted
FEW_TRAINED = 0.01  # of the tokens, below which a dataset hardly trains
MOST_REPEATED, LONG = 0.1, 20  # share of rows with one response; its characters, if it is no label
UNBALANCED = 0.1  # share of the rarer label
ODD_ADVICE = {
    NO_END: "add a response, or remove the rows: there is nothing to train on at their end",
    FIRST: "the response has no prompt; check that no turn is missing",
    TWICE: "check for missing turns; most chat templates expect them to alternate",
    LATE: "most chat templates read a system message only at the beginning",
    ALONE: "check for missing calls",
    PLACEHOLDER: "name the column of the pictures in the entry, or remove the placeholders, which "
    "are read as text",
    CONTROL: "is the text already rendered by a chat template? Give messages instead",
    LOOP: "a model imitates that; read some of them",
    ECHO: "check the columns of the entry",
}


def findings_of(
    section: DataSection, datasets: Sequence[DatasetFigures], overlaps: Sequence[Overlap]
) -> list[Finding]:
    """Everything to look at, problems first."""
    findings = [finding for figures in datasets for finding in findings_in(figures)]
    for name in section.datasets:
        if name in section.eval_datasets:
            what = "datasets that are used for training and for evaluation"
            advice = "its evaluation does not measure generalization"
            findings.append(Finding("problem", str(name), what, 1, (), advice))
    findings += [finding for overlap in overlaps for finding in _of_overlap(overlap)]
    return sorted(findings, key=lambda finding: finding.level != "problem")


def findings_in(figures: DatasetFigures) -> Iterator[Finding]:
    """What to look at in one dataset."""
    name = figures.name

    def found(level: Level, what: str, count: int, shown: Sequence[str], advice: str) -> Finding:
        return Finding(level, name, what, count, tuple(shown), advice)

    for kind, rows_with in figures.odd.items():
        yield found("problem", kind, rows_with.count, rows_with.rows, ODD_ADVICE[kind])
    if bad := figures.bad_pictures:
        advice = "restore or convert the files, or remove the rows; each of them stops training"
        yield found("problem", "pictures that cannot be read", len(bad), bad, advice)
    if figures.broken.count:
        broken = figures.broken
        yield found("problem", "rows that cannot be read", broken.count, broken.rows, "mend them")
    for reason, rows_with in figures.dropped.items():
        what = f"examples that are dropped: {reason}"
        cure = "raise data.cutoff_len" if "cutoff_len" in reason else "mend or remove them"
        yield found("problem", what, rows_with.count, rows_with.rows, cure)
    equal = figures.equal
    if equal.count:
        level: Level = "problem" if equal.count > FEW_EQUAL * figures.rows else "note"
        advice = "rows that occur several times are trained on more often than the others"
        yield found(level, "rows equal to an earlier one", equal.count, equal.rows, advice)
    yield from _of_lengths(figures)
    yield from _of_responses(figures)
    for remark in figures.remarks:
        yield found("note", remark, figures.rows, (), "")
    for note, rows_with in figures.notes.items():
        yield found("note", note, rows_with.count, rows_with.rows, "")
    if figures.unread:
        advice = "name them in the entry if they are part of an example"
        what = "columns that nothing reads"
        yield found("note", what, len(figures.unread), figures.unread, advice)


def _of_lengths(figures: DatasetFigures) -> Iterator[Finding]:
    name, cut = figures.name, figures.cut
    if cut.count:
        level: Level = "problem" if cut.count > FEW_CUT * figures.rows else "note"
        advice = "raise data.cutoff_len, or set data.on_too_long: drop"
        what = "examples that are truncated to data.cutoff_len"
        yield Finding(level, name, what, cut.count, tuple(cut.rows), advice)
    if figures.items and figures.share_trained < FEW_TRAINED:
        what = f"trained tokens, {100 * figures.share_trained:.2g} % of all"
        advice = "most of the work is on prompts; are the responses in the right column?"
        yield Finding("problem", name, what, figures.trained_tokens, (), advice)
    if not figures.items:
        yield Finding("problem", name, "rows, none of which is trained on", figures.rows)


def _of_responses(figures: DatasetFigures) -> Iterator[Finding]:
    name = figures.name
    for repeated in figures.repeated:
        if repeated.count > MOST_REPEATED * figures.rows:
            level: Level = "problem" if len(repeated.text) >= LONG else "note"
            what = f"rows with one response, {repeated.text!r}"
            yield Finding(
                level, name, what, repeated.count, (repeated.row,), "a model learns it by heart"
            )
    labels = figures.labels
    if labels and min(labels[True], labels[False]) < UNBALANCED * labels.total():
        what = f"rows marked good, and {labels[False]:,} marked bad"
        advice = "weigh them with stage.kto.desirable_weight and undesirable_weight"
        yield Finding("note", name, what, labels[True], (), advice)


def _of_overlap(overlap: Overlap) -> Iterator[Finding]:
    advice = "remove them from one of the two: they are not new to the model"
    for what, rows_with in (
        ("rows that are also in the training data", overlap.same),
        ("prompts that are also in the training data, with another response", overlap.prompt),
    ):
        if rows_with.count:
            rows = tuple(rows_with.rows)
            yield Finding("problem", overlap.evaluation, what, rows_with.count, rows, advice)


ANSWERS = (None, "chosen", "rejected")  # what the lengths of a pair are of


@dataclass(frozen=True)
class TextSpan:
    """A span of text that is trained or masked; for a pair, also the response that contains it."""

    text: str
    learnt: bool
    answer: str | None = None  # chosen or rejected
    picture: str = ""  # that stands here, small, as a data URL


@dataclass(frozen=True)
class RenderedExample:
    """One sequence of an example."""

    parts: Sequence[TextSpan]
    tokens: int
    trained_tokens: int


@dataclass(frozen=True)
class PreviewExample:
    """One example and its outcome."""

    origin: str
    tokens: int  # before anything was cut
    cut: bool
    dropped: str | None
    items: Sequence[RenderedExample]

    @property
    def outcome(self) -> str:
        """Its tokens, and how many are trained, or why it is dropped."""
        if self.dropped:
            return f"dropped: {self.dropped}"
        tokens = counted(sum(item.tokens for item in self.items), "token")
        trained = sum(item.trained_tokens for item in self.items)
        cut = f", truncated from {self.tokens:,}" if self.cut else ""
        several = f" in {len(self.items)} sequences" if len(self.items) > 1 else ""
        return f"{tokens}{cut}{several}, {trained:,} trained"


def preview_example(
    codec: Codec, example: Example, outcome: Encoded, whole: Encoded
) -> PreviewExample:
    """An example as it is trained on; ``whole`` is its outcome without a limit of length."""
    return PreviewExample(
        origin=example.origin,
        tokens=sum(num_tokens_of(item) for item in items_of(whole)),
        cut=isinstance(outcome, Truncated),
        dropped=outcome.reason if isinstance(outcome, Dropped) else None,
        items=[_sequence(codec, item) for item in items_of(outcome)],
    )


def _pairs(item: Features) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Ids and labels; in some stages an item has several, such as chosen and rejected."""
    for name, ids in item.items():
        if name.endswith("input_ids"):
            yield ids, item[name.removesuffix("input_ids") + "labels"]


def num_tokens_of(item: Features) -> int:
    """The tokens of an item, of both responses of a pair."""
    return sum(len(ids) for ids, _ in _pairs(item))


def num_limited(item: Features) -> int:
    """The tokens that ``cutoff_len`` limits: of a pair, the prompt with its longer response."""
    if "lengths" not in item:
        return num_tokens_of(item)
    prompt, *answers = (int(length) for length in item["lengths"])
    return prompt + max(answers)


def num_trained_of(item: Features) -> int:
    """Its trained tokens; nothing predicts the first one of a sequence."""
    return sum(label != IGNORE_INDEX for _, labels in _pairs(item) for label in labels[1:])


def _sequence(codec: Codec, item: Features) -> RenderedExample:
    parts: list[TextSpan] = []
    trained = 0
    for ids, labels in _pairs(item):
        is_trained = [label != IGNORE_INDEX for label in labels]
        trained += sum(is_trained[1:])  # nothing predicts the first token
        answers = _answers(item, len(ids))
        pictures, places = seen_in(item), _places(codec, item, ids)
        kinds = list(zip(is_trained, answers, places, strict=True))
        bounds = [0, *(i for i in range(1, len(ids)) if kinds[i] != kinds[i - 1]), len(ids)]
        for start, end in pairwise(bounds):
            if (place := places[start]) is not None:
                if place not in places[:start]:
                    span = _picture(codec, pictures[place])
                    parts.append(replace(span, answer=answers[start]))
                continue
            text = codec.tokenizer.decode(_trained(ids[start:end], labels[start:end]))
            parts.append(TextSpan(text, is_trained[start], answers[start]))
    return RenderedExample(parts, num_tokens_of(item), trained)


def _places(codec: Codec, item: Features, ids: Sequence[int]) -> list[int | None]:
    """For each token, the number of the picture that it is a placeholder of."""
    placeholders = frozenset() if codec.media is None else codec.media.processor.token_ids
    numbers = iter([n for n, seen in enumerate(seen_in(item)) for _ in range(seen.tokens)])
    return [next(numbers, None) if i in placeholders else None for i in ids]


def _picture(codec: Codec, seen: Seen) -> TextSpan:
    """A picture in place of its tokens. Raises ``DataError``: it has changed meanwhile."""
    assert codec.media is not None
    size = f"{seen.width} x {seen.height}, {counted(seen.tokens, 'token')}"
    picture = codec.media.files.thumbnail(seen)
    return TextSpan(f"[{seen.name}: {size}]", False, picture=picture)


def _trained(ids: Sequence[int], labels: Sequence[int]) -> list[int]:
    """The tokens to show: where another one than the next is trained, that one in front."""
    pairs = zip(ids, labels, strict=True)
    return [
        token
        for i, label in pairs
        for token in ((i,) if label in (i, IGNORE_INDEX) else (label, i))
    ]


def _answers(item: Features, count: int) -> list[str | None]:
    """For each token, the response of a pair that contains it."""
    lengths = item.get("lengths", (count,))
    return [name for name, length in zip(ANSWERS, lengths, strict=False) for _ in range(length)]


BINS = 8  # up to cutoff_len
QUANTILES = (0.5, 0.9, 0.95, 0.99, 1.0)


@dataclass(frozen=True)
class LengthBin:
    """The sequences with more than ``above`` tokens, and at most ``most``."""

    above: int
    most: int
    count: int


def length_bins(lengths: Mapping[int, int], cutoff_len: int) -> list[LengthBin]:
    """Bins of equal width up to ``cutoff_len``, doubled from there on, the last up to the
    longest."""
    if not lengths:
        return []
    edges = _edges(max(lengths), cutoff_len)
    counts: Counter[int] = Counter()
    for length, count in lengths.items():
        counts[bisect_left(edges, length)] += count
    return [
        LengthBin(above, most, counts[number])
        for number, (above, most) in enumerate(pairwise([0, *edges]))
    ]


def quantiles(lengths: Counter[int]) -> Mapping[float, int]:
    """Tokens that each of ``QUANTILES``, shares of all sequences, does not exceed."""
    total, seen, length_at_share = lengths.total(), 0, dict[float, int]()
    for length in sorted(lengths):
        seen += lengths[length]
        for share in QUANTILES:
            if share not in length_at_share and seen >= share * total:
                length_at_share[share] = length
    return length_at_share


def _edges(longest: int, cutoff_len: int) -> list[int]:
    """The upper bounds: one at ``cutoff_len``, the last at ``longest``."""
    top = min(longest, cutoff_len)
    steps = {top * i // BINS for i in range(1, BINS + BINS // 2)}
    steps |= {top << power for power in range(1, (longest // top).bit_length())} if top else set()
    return sorted({step for step in steps if 0 < step < longest} | {longest})
