"""``surefoot preview``: the tokenized data, and which tokens are trained on."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.text import Text

from .loading import loading

if TYPE_CHECKING:
    from ..batch import Features
    from ..data.encoded import Encoded
    from ..data.example import Example
    from ..data.rows.row_sources import BrokenRow
    from ..data.text.codec import Codec
    from ..recipe.recipe import Recipe

ROWS = 2000  # of each dataset, for the figures, unless all are asked for
BATCH = 500
LEARNT, REJECTED = "bold green", "bold red"
ANSWERS = (None, "chosen", "rejected")  # what the lengths of a pair are of
BINS, WIDTH = 8, 40  # bars of the histogram up to cutoff_len, and characters of the longest
UNLIMITED = 1 << 30


@dataclass(frozen=True)
class TextSpan:
    """A span of text that is trained or masked; for a pair, also the response that contains it."""

    text: str
    learnt: bool
    answer: str | None = None  # chosen or rejected


@dataclass(frozen=True)
class Rendered:
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
    items: Sequence[Rendered]


@dataclass
class DatasetStats:
    """Statistics of the rows of a dataset that were read."""

    name: str
    rows: int = 0
    all_rows: bool = True  # whether the dataset has no more
    broken: list[str] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> examples
    cut: int = 0
    items: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    lengths: list[int] = field(default_factory=list)  # of sequences, before anything was cut
    shown: list[PreviewExample] = field(default_factory=list)


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option(
    "-n",
    "count",
    default=3,
    type=click.IntRange(0),
    help="Number of examples to show of each dataset.",
)
@click.option("--dataset", help="Only this dataset.")
@click.option("--all", "all_rows", is_flag=True, help=f"Read all rows, not the first {ROWS:,}.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def preview(recipe: Path, overrides: tuple[str, ...], **options: object) -> None:
    """Show the tokenized data of RECIPE as the model reads it, and which tokens are trained on.

    Prints the first examples of each dataset as they are rendered. Trained tokens are green ([[ ]]
    when not on a terminal), masked tokens are dim. Then statistics: lengths, and what is truncated
    or dropped and why. Nothing is trained, and no weights are read.

    OVERRIDES are dotted fields such as data.cutoff_len=512.
    """
    from ..recipe.recipe import load

    loaded = load(recipe, overrides)  # what is wrong with it is said before the slow imports
    with loading():
        from ..model.pretrained.loading import resolve
        from ..run.assembly import build_codec

    codec = build_codec(loaded, resolve(loaded.model))
    limit = None if options["all_rows"] else ROWS
    names = (str(options["dataset"]),) if options["dataset"] else _names(loaded)
    count = int(str(options["count"]))
    found = [measure(loaded, codec, name, count=count, limit=limit) for name in names]
    if options["as_json"]:
        click.echo(json.dumps(summary(loaded, found), ensure_ascii=False, indent=2))
    else:
        console = Console(soft_wrap=True, highlight=False)
        for figures in found:
            show(console, figures, loaded.data.cutoff_len)


def _names(recipe: Recipe) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*recipe.data.datasets, *recipe.data.eval_datasets]))


def measure(
    recipe: Recipe, codec: Codec, name: str, *, count: int, limit: int | None
) -> DatasetStats:
    """Encode the rows of a dataset twice: as training will, and without a limit of length."""
    from ..data.rows.registry import read_registry
    from ..data.rows.rows import read_examples

    limits = [n for n in (limit, recipe.data.max_samples) if n is not None]
    entry = read_registry(recipe.data.dataset_dir).entry(name)
    rows = read_examples(entry, max_samples=recipe.data.max_samples, max_broken_rows=UNLIMITED)
    wanted = islice(rows, min(limits)) if limits else rows
    figures = DatasetStats(name)
    while batch := list(islice(wanted, BATCH)):
        _add(figures, recipe, codec, batch, count)
    figures.all_rows = next(rows, None) is None
    return figures


def _add(
    figures: DatasetStats,
    recipe: Recipe,
    codec: Codec,
    batch: Sequence[Example | BrokenRow],
    count: int,
) -> None:
    from ..data.example import Example

    examples = [row for row in batch if isinstance(row, Example)]
    figures.rows += len(batch)
    figures.broken += [
        f"{figures.name}:{row.index}: {row.reason}" for row in batch if not isinstance(row, Example)
    ]
    unlimited = codec.with_section(replace(recipe.data, cutoff_len=UNLIMITED, on_too_long="cut"))
    outcomes = recipe.stage.encode(examples, codec)
    wholes = recipe.stage.encode(examples, unlimited)
    for example, outcome, whole in zip(examples, outcomes, wholes, strict=True):
        shown = _shown(codec, example, outcome, whole)
        if shown.dropped:
            figures.dropped[shown.dropped] = figures.dropped.get(shown.dropped, 0) + 1
        figures.cut += shown.cut
        figures.items += len(shown.items)
        figures.tokens += sum(item.tokens for item in shown.items)
        figures.trained_tokens += sum(item.trained_tokens for item in shown.items)
        figures.lengths += [_num_tokens(item) for item in _items(whole)]
        if len(figures.shown) < count:
            figures.shown.append(shown)


def _shown(codec: Codec, example: Example, outcome: Encoded, whole: Encoded) -> PreviewExample:
    from ..data.encoded import Dropped, Truncated

    return PreviewExample(
        origin=example.origin,
        tokens=sum(_num_tokens(item) for item in _items(whole)),
        cut=isinstance(outcome, Truncated),
        dropped=outcome.reason if isinstance(outcome, Dropped) else None,
        items=[_sequence(codec, item) for item in _items(outcome)],
    )


def _items(outcome: Encoded) -> Sequence[Features]:
    from ..data.encoded import Dropped, Truncated

    if isinstance(outcome, Dropped):
        return ()
    return outcome.features if isinstance(outcome, Truncated) else outcome


def _pairs(item: Features) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Ids and labels; in some stages an item has several, such as chosen and rejected."""
    for name, ids in item.items():
        if name.endswith("input_ids"):
            yield ids, item[name.removesuffix("input_ids") + "labels"]


def _num_tokens(item: Features) -> int:
    return sum(len(ids) for ids, _ in _pairs(item))


def _sequence(codec: Codec, item: Features) -> Rendered:
    from ..batch import IGNORE_INDEX

    parts: list[TextSpan] = []
    trained = 0
    for ids, labels in _pairs(item):
        is_learnt = [label != IGNORE_INDEX for label in labels]
        trained += sum(is_learnt[1:])  # nothing predicts the first token
        answers = _answers(item, len(ids))
        kinds = list(zip(is_learnt, answers, strict=True))
        bounds = [0, *(i for i in range(1, len(ids)) if kinds[i] != kinds[i - 1]), len(ids)]
        for start, end in pairwise(bounds):
            text = codec.tokenizer.decode(list(ids[start:end]))
            parts.append(TextSpan(text, is_learnt[start], answers[start]))
    return Rendered(parts, _num_tokens(item), trained)


def _answers(item: Features, count: int) -> list[str | None]:
    """For each token, the response of a pair that contains it."""
    lengths = item.get("lengths", (count,))
    return [name for name, length in zip(ANSWERS, lengths, strict=False) for _ in range(length)]


def show(console: Console, figures: DatasetStats, cutoff_len: int) -> None:
    """Print examples, a legend and statistics."""
    for shown in figures.shown:
        _show_example(console, shown)
    if any(shown.items for shown in figures.shown):
        console.print(_legend(console), end="\n\n")
    console.print(Text(figures.name, style="bold"))
    for line in _lines(figures):
        console.print(f"  {line}", markup=False)
    for line in histogram(figures.lengths, cutoff_len):
        console.print(f"  {line}", markup=False)
    console.print()


def _show_example(console: Console, shown: PreviewExample) -> None:
    console.print(Text(f"── {shown.origin}: {_fate(shown)}", style="bold"))
    for item in shown.items:
        text, answer = Text(), None
        for part in item.parts:
            if part.answer != answer:
                newline = "" if text.plain.endswith("\n") else "\n"
                text.append(f"{newline}{part.answer}: ", style="bold")
            answer = part.answer
            style = REJECTED if answer == ANSWERS[-1] else LEARNT
            is_marked = part.learnt and not console.is_terminal
            words = f"[[{part.text}]]" if is_marked else part.text
            text.append(words, style=style if part.learnt else "dim")
        console.print(text)
    console.print()


def _fate(shown: PreviewExample) -> str:
    if shown.dropped:
        return f"dropped: {shown.dropped}"
    tokens = _count(sum(item.tokens for item in shown.items), "token")
    trained = sum(item.trained_tokens for item in shown.items)
    cut = f", truncated from {shown.tokens:,}" if shown.cut else ""
    several = f" in {len(shown.items)} sequences" if len(shown.items) > 1 else ""
    return f"{tokens}{cut}{several}, {trained:,} trained"


def _legend(console: Console) -> Text:
    if not console.is_terminal:
        return Text("[[ ]]: trained; everything else is masked")
    return Text.assemble(("trained", LEARNT), "  ", ("masked", "dim"))


def _lines(figures: DatasetStats) -> Iterator[str]:
    first = "" if figures.all_rows else "the first "
    yield (
        f"{first}{_count(figures.rows, 'row')}, {_count(figures.items, 'sequence')}, "
        f"{_count(figures.tokens, 'token')}, {figures.trained_tokens:,} trained"
    )
    if figures.broken:
        yield f"{_count(len(figures.broken), 'row')} cannot be read, such as {figures.broken[0]}"
    for reason, count in sorted(figures.dropped.items(), key=lambda item: -item[1]):
        yield f"{_count(count, 'example')} dropped: {reason}"
    if figures.cut:
        yield f"{_count(figures.cut, 'example')} truncated to data.cutoff_len"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def histogram(lengths: Sequence[int], cutoff_len: int) -> Iterator[str]:
    """Lines with bars, and the position of ``cutoff_len`` among the lengths."""
    if not lengths:
        return
    ordered = sorted(lengths)
    longest = ordered[-1]
    yield (
        f"tokens of a sequence before truncation: median {ordered[len(ordered) // 2]:,}, "
        f"95 % up to {ordered[(len(ordered) * 95 - 1) // 100]:,}, longest {longest:,}"
    )
    edges = _edges(longest, cutoff_len)
    counts = Counter(bisect_left(edges, length) for length in ordered)
    most = max(counts.values())
    for number, (start, end) in enumerate(pairwise([0, *edges])):
        bar = "█" * -(-counts[number] * WIDTH // most)
        yield f"{f'{start + 1:,} to {end:,}':>20} {bar} {counts[number]:,}"
        if end == cutoff_len < longest:
            yield f"{'':>20} {'─' * 6} data.cutoff_len {cutoff_len:,} {'─' * 6}"
    if longest <= cutoff_len:
        yield f"no sequence is longer than data.cutoff_len {cutoff_len:,}"


def _edges(longest: int, cutoff_len: int) -> list[int]:
    """The upper bounds of the bars: the last at ``longest``, and one at ``cutoff_len`` if
    anything is longer.
    """
    top = min(longest, cutoff_len)
    steps = {top * i // BINS for i in range(1, 2 * BINS)}
    return sorted({step for step in steps if 0 < step < longest} | {longest})


def summary(recipe: Recipe, found: Sequence[DatasetStats]) -> Mapping[str, object]:
    """The same as plain data, for scripts."""
    datasets = [{**asdict(figures), "lengths": sorted(figures.lengths)} for figures in found]
    return {"cutoff_len": recipe.data.cutoff_len, "datasets": datasets}
