"""The tokenized data: rendered examples with their labels, and statistics of the rows read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, pairwise

from ..batch import IGNORE_INDEX, Features
from ..data.encoded import Dropped, Encoded, Truncated, items_of
from ..data.example import Example
from ..data.rows.catalog import Catalog
from ..data.rows.row_sources import BrokenRow
from ..data.rows.rows import read_examples
from ..data.store.encoder import unread_in
from ..data.text.codec import Codec
from ..errors import counted
from ..recipe.recipe import Recipe
from .data_check.conversations import FIRST, NO_END, oddities

BATCH = 500
TURNS = (NO_END, FIRST)  # what is said of turns that are omitted, or have no question
ANSWERS = (None, "chosen", "rejected")  # what the lengths of a pair are of
UNLIMITED = 1 << 30


@dataclass(frozen=True)
class TextSpan:
    """A span of text that is trained or masked; for a pair, also the response that contains it."""

    text: str
    learnt: bool
    answer: str | None = None  # chosen or rejected


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


@dataclass
class DatasetStats:
    """Statistics of the rows of a dataset that were read."""

    name: str
    rows: int = 0
    all_rows: bool = True  # whether the dataset has no more
    broken: list[str] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> examples
    cut: int = 0
    unread: list[str] = field(default_factory=list)  # columns that nothing reads
    notices: list[str] = field(default_factory=list)  # on how its source is read
    notes: dict[str, int] = field(default_factory=dict)  # note -> examples
    items: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    lengths: list[int] = field(default_factory=list)  # of sequences, before anything was cut
    shown: list[PreviewExample] = field(default_factory=list)

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

    def remarks(self) -> Iterator[str]:
        """What was not read, or not as it is; nothing if all is well."""
        yield from self.notices
        if self.broken:
            yield f"{counted(len(self.broken), 'row')} cannot be read, such as {self.broken[0]}"
        for reason, count in sorted(self.dropped.items(), key=lambda item: -item[1]):
            yield f"{counted(count, 'example')} dropped: {reason}"
        if self.unread:
            yield f"columns that nothing reads: {', '.join(self.unread)}"
        for note, count in self.notes.items():
            yield f"{counted(count, 'example')}: {note}"
        if self.cut:
            yield f"{counted(self.cut, 'example')} truncated to data.cutoff_len"


def preview_data(
    recipe: Recipe,
    codec: Codec,
    *,
    dataset: str | None = None,
    count: int = 3,
    limit: int | None = None,
) -> list[DatasetStats]:
    """The rows of each dataset of a recipe, or of one ``dataset``: the first ``limit``, and
    ``count`` of them as examples. Nothing is written to the cache. Raises ``DataError``."""
    known = map(str, (*recipe.data.datasets, *recipe.data.eval_datasets))
    names = [dataset] if dataset else [*known]
    return [
        _preview(recipe, codec, name, count=count, limit=limit) for name in dict.fromkeys(names)
    ]


def as_data(codec: Codec, found: Sequence[DatasetStats]) -> Mapping[str, object]:
    """All of it as plain data."""
    datasets = [{**asdict(stats), "lengths": sorted(stats.lengths)} for stats in found]
    return {"cutoff_len": codec.section.cutoff_len, "datasets": datasets}


def _preview(
    recipe: Recipe, codec: Codec, name: str, *, count: int, limit: int | None
) -> DatasetStats:
    """Encode the rows of a dataset twice: as training will, and without a limit of length."""
    limits = [n for n in (limit, recipe.data.max_samples) if n is not None]
    entry = Catalog(recipe.data).entry(name)
    rows = read_examples(entry, max_samples=recipe.data.max_samples, max_broken_rows=UNLIMITED)
    wanted = islice(rows, min(limits)) if limits else rows
    stats = DatasetStats(name, notices=list(entry.source.remarks))
    while batch := list(islice(wanted, BATCH)):
        _add(stats, recipe, codec, batch, count)
    stats.all_rows = next(rows, None) is None
    return stats


def _add(
    stats: DatasetStats,
    recipe: Recipe,
    codec: Codec,
    batch: Sequence[Example | BrokenRow],
    count: int,
) -> None:
    examples = [row for row in batch if isinstance(row, Example)]
    stats.rows += len(batch)
    for row in batch:
        if isinstance(row, BrokenRow) and row.is_dropped:
            stats.dropped[row.reason] = stats.dropped.get(row.reason, 0) + 1
        elif isinstance(row, BrokenRow):
            stats.broken.append(f"{stats.name}:{row.index}: {row.reason}")
    unlimited = codec.with_section(
        replace(recipe.data, cutoff_len=UNLIMITED, on_too_long="truncate")
    )
    outcomes = recipe.stage.encode(examples, codec)
    wholes = recipe.stage.encode(examples, unlimited)
    unread = unread_in(examples, [item for whole in wholes for item in items_of(whole)])
    stats.unread = list(dict.fromkeys((*stats.unread, *unread)))
    for example, outcome, whole in zip(examples, outcomes, wholes, strict=True):
        is_trained = recipe.stage.uses_template and not recipe.stage.max_new_tokens
        odd = oddities(example, (), needs_response=is_trained)
        for note in (*example.notes, *(what for what in odd if is_trained and what in TURNS)):
            stats.notes[note] = stats.notes.get(note, 0) + 1
        shown = _shown(codec, example, outcome, whole)
        if shown.dropped:
            stats.dropped[shown.dropped] = stats.dropped.get(shown.dropped, 0) + 1
        stats.cut += shown.cut
        stats.items += len(shown.items)
        stats.tokens += sum(item.tokens for item in shown.items)
        stats.trained_tokens += sum(item.trained_tokens for item in shown.items)
        stats.lengths += [num_limited(item) for item in items_of(whole)]
        _show(stats, shown, count)


def _show(stats: DatasetStats, one: PreviewExample, count: int) -> None:
    """Keep the first ``count`` examples; one that is dropped makes room for one that is not."""
    dropped = next((each for each in stats.shown if each.dropped), None)
    if len(stats.shown) == count and dropped and not one.dropped:
        stats.shown.remove(dropped)
    if len(stats.shown) < count:
        stats.shown.append(one)


def _shown(codec: Codec, example: Example, outcome: Encoded, whole: Encoded) -> PreviewExample:
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
        kinds = list(zip(is_trained, answers, strict=True))
        bounds = [0, *(i for i in range(1, len(ids)) if kinds[i] != kinds[i - 1]), len(ids)]
        for start, end in pairwise(bounds):
            text = codec.tokenizer.decode(_trained(ids[start:end], labels[start:end]))
            parts.append(TextSpan(text, is_trained[start], answers[start]))
    return RenderedExample(parts, num_tokens_of(item), trained)


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
