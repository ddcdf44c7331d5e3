"""``surefoot preview``: the tokenized data, and which tokens are trained on."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.text import Text

from ..terminal_text import one_line, visible
from .loading import loading

if TYPE_CHECKING:
    from ..inference.preview import DatasetStats, PreviewExample

ROWS = 2000  # of each dataset, unless all are asked for; said in the help, before slow imports
LEARNT, REJECTED = "bold green", "bold red"
BINS, WIDTH = 8, 40  # bars of the histogram up to cutoff_len, and characters of the longest


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
def preview(
    recipe: Path,
    overrides: tuple[str, ...],
    *,
    count: int,
    dataset: str | None,
    all_rows: bool,
    as_json: bool,
) -> None:
    """Show the tokenized data of RECIPE as the model reads it, and which tokens are trained on.

    Prints the first examples of each dataset as they are rendered. Trained tokens are green ([[ ]]
    when not on a terminal), masked tokens are dim. Then statistics: lengths, and what is truncated
    or dropped and why. Nothing is trained, and no weights are read.

    OVERRIDES are dotted fields such as data.cutoff_len=512.
    """
    from ..recipe.recipe import load

    loaded = load(recipe, overrides)  # what is wrong with it is said before the slow imports
    with loading():
        from ..inference.preview import as_data, preview_data
        from ..recipe.recipe_data import find_base
        from ..run.policy import build_codec

    codec = build_codec(loaded, find_base(loaded))
    found = preview_data(
        loaded,
        codec,
        dataset=dataset,
        count=count,
        limit=None if all_rows else ROWS,
    )
    if as_json:
        click.echo(visible(json.dumps(as_data(codec, found), ensure_ascii=False, indent=2)))
        return
    console = Console(soft_wrap=True, highlight=False)
    for stats in found:
        show(console, stats, codec.section.longest)


def show(console: Console, figures: DatasetStats, cutoff_len: int) -> None:
    """Print examples, a legend and statistics."""
    for shown in figures.shown:
        _show_example(console, shown)
    if any(shown.items for shown in figures.shown):
        console.print(_legend(console), end="\n\n")
    console.print(Text(one_line(figures.name), style="bold"))
    for line in _lines(figures):
        console.print(f"  {one_line(line)}", markup=False)
    for line in histogram(figures.lengths, cutoff_len):
        console.print(f"  {line}", markup=False)
    console.print()


def _show_example(console: Console, shown: PreviewExample) -> None:
    console.print(Text(one_line(f"── {shown.origin}: {_fate(shown)}"), style="bold"))
    for item in shown.items:
        text, answer = Text(), None
        for part in item.parts:
            if part.answer != answer:
                newline = "" if text.plain.endswith("\n") else "\n"
                text.append(f"{newline}{part.answer}: ", style="bold")
            answer = part.answer
            style = REJECTED if answer == "rejected" else LEARNT
            is_marked = part.learnt and not console.is_terminal
            words = visible(part.text)
            words = f"[[{words}]]" if is_marked else words
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
    if figures.unread:
        yield f"columns that nothing reads: {', '.join(figures.unread)}"
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
        f"tokens of a sequence before truncation: median {ordered[len(ordered) // 2]:,}, 95 % "
        f"up to {ordered[(len(ordered) * 95 - 1) // 100]:,}, longest {longest:,}"
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
    """The upper bounds of bars: one at ``cutoff_len``, doubled from there on, the last at
    ``longest``."""
    top = min(longest, cutoff_len)
    steps = {top * i // BINS for i in range(1, BINS + BINS // 2)}
    steps |= {top << power for power in range(1, (longest // top).bit_length())} if top else set()
    return sorted({step for step in steps if 0 < step < longest} | {longest})
