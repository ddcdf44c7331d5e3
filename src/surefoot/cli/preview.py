"""``surefoot preview``: the tokenized data, and which tokens are trained on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.text import Text

from ..errors import DataError
from ..terminal_text import one_line, visible
from .loading import loading, resolved_recipe

if TYPE_CHECKING:
    from ..use.data_check.figures import DatasetFigures
    from ..use.preview import PreviewExample

ROWS = 2000  # of each dataset, unless all are asked for; said in the help, before slow imports
LEARNT, REJECTED = "bold green", "bold red"
WIDTH = 40  # characters of the longest bar of the histogram


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
@click.option(
    "--html",
    "page",
    type=click.Path(path_type=Path),
    help="Write the examples, with colored masks, and the statistics to this file.",
)
def preview(
    recipe: Path,
    overrides: tuple[str, ...],
    *,
    count: int,
    dataset: str | None,
    all_rows: bool,
    as_json: bool,
    page: Path | None,
) -> None:
    """Show the tokenized data of RECIPE as the model reads it, and which tokens are trained on.

    Prints the first examples of each dataset as they are rendered. Trained tokens are green ([[ ]]
    when not on a terminal), masked tokens are dim. Then statistics: lengths, and what is truncated
    or dropped and why. Nothing is trained, and no weights are read.

    OVERRIDES are dotted fields such as data.cutoff_len=512.
    """
    loaded = resolved_recipe(recipe, overrides)
    with loading():
        from ..recipe.recipe_data import find_base
        from ..run.policy import build_codec
        from ..use.data_check.check import preview_data
        from ..use.pages.example_page import preview_page, write_page

    codec = build_codec(loaded, find_base(loaded))
    limit = None if all_rows else ROWS
    found = preview_data(loaded, codec, dataset=dataset, count=count, limit=limit)
    if page is not None:
        write_page(page, preview_page(found, str(recipe), codec.section.longest))
        click.echo(f"written to {page}", err=True)
        if not as_json:
            return
    if as_json:
        plain = {"cutoff_len": codec.section.longest, "datasets": [one.as_data() for one in found]}
        click.echo(visible(json.dumps(plain, ensure_ascii=False, indent=2)))
        return
    console = Console(soft_wrap=True, highlight=False)
    for stats in found:
        show(console, stats, codec.section.longest)
    if empty := [stats.name for stats in found if stats.rows and not stats.items]:
        raise DataError(f"{', '.join(empty)}: none of the rows above has trained tokens")


def show(console: Console, figures: DatasetFigures, cutoff_len: int) -> None:
    """Print examples, a legend and statistics."""
    for shown in figures.shown:
        _show_example(console, shown)
    if any(shown.items for shown in figures.shown):
        console.print(_legend(console), end="\n\n")
    console.print(Text(one_line(figures.name), style="bold"))
    for line in (", ".join(figures.totals), *figures.warnings()):
        console.print(f"  {one_line(line)}", markup=False)
    for line in histogram(figures.lengths, cutoff_len):
        console.print(f"  {line}", markup=False)
    console.print()


def _show_example(console: Console, shown: PreviewExample) -> None:
    console.print(Text(one_line(f"── {shown.origin}: {shown.outcome}"), style="bold"))
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


def _legend(console: Console) -> Text:
    if not console.is_terminal:
        return Text("[[ ]]: trained; everything else is masked")
    return Text.assemble(("trained", LEARNT), "  ", ("masked", "dim"))


def histogram(lengths: Iterable[int], cutoff_len: int) -> Iterator[str]:
    """Lines with bars, and the position of ``cutoff_len`` among the lengths, or counts of them."""
    from ..use.pages.length_histogram import length_bins, quantile

    counts = Counter(lengths)
    bins = length_bins(counts, cutoff_len)
    if not bins:
        return
    total, longest = counts.total(), max(counts)
    yield (
        f"tokens of a sequence before truncation: median {quantile(counts, total // 2):,}, 95 % "
        f"up to {quantile(counts, (total * 95 - 1) // 100):,}, longest {longest:,}"
    )
    most = max(each.count for each in bins)
    for each in bins:
        bar = "█" * -(-each.count * WIDTH // most)
        yield f"{f'{each.above + 1:,} to {each.most:,}':>20} {bar} {each.count:,}"
        if each.most == cutoff_len < longest:
            yield f"{'':>20} {'─' * 6} data.cutoff_len {cutoff_len:,} {'─' * 6}"
    if longest <= cutoff_len:
        yield f"no sequence is longer than data.cutoff_len {cutoff_len:,}"
