"""``surefoot data check``: lengths, duplicates, overlap and odd rows of a recipe's datasets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.text import Text

from ...errors import counted
from ...terminal_text import one_line, visible
from ..loading import loading, resolved_recipe
from ..preview import histogram

if TYPE_CHECKING:
    from ...use.data_check.figures import DataCheck, DatasetFigures, Finding


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--dataset", help="Only this dataset.")
@click.option("--rows", type=click.IntRange(1), help="Read at most so many rows of each dataset.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(
    recipe: Path,
    overrides: tuple[str, ...],
    *,
    dataset: str | None,
    rows: int | None,
    as_json: bool,
) -> None:
    """Check the rows of RECIPE before training.

    Reports lengths in tokens and what is truncated or dropped, the share of trained tokens, equal
    and similar rows, rows of the evaluation data that are in the training data, responses that are
    empty or repeated, and conversations with an odd order of turns. Nothing is trained, and no
    weights are read.

    The exit code is 0 without problems, 1 with problems, and 2 if the data cannot be read.

    OVERRIDES are dotted fields such as data.cutoff_len=512.
    """
    loaded = resolved_recipe(recipe, overrides)
    with loading():
        from ...recipe.recipe_data import find_base
        from ...run.policy import build_codec
        from ...use.data_check.check import check_data

    codec = build_codec(loaded, find_base(loaded, weights=False))
    found = check_data(loaded, codec, dataset=dataset, limit=rows)
    if as_json:
        click.echo(visible(json.dumps(found.as_data(), ensure_ascii=False, indent=2)))
    else:
        _show(Console(soft_wrap=True, highlight=False), found)
    if found.has_problems:
        raise click.exceptions.Exit(1)


def _show(console: Console, found: DataCheck) -> None:
    for figures in found.datasets:
        console.print(Text(one_line(figures.name), style="bold"))
        for line in _lines(figures):
            console.print(f"  {one_line(line)}", markup=False)
        for line in histogram(figures.lengths, found.cutoff_len):
            console.print(f"  {line}", markup=False)
        console.print()
    for overlap in found.overlaps:
        console.print(Text(one_line(f"evaluation data: {overlap.evaluation}"), style="bold"))
        of = f"of {counted(overlap.rows, 'row')}"
        console.print(f"  {overlap.same.count:,} {of} are in the training data", markup=False)
        console.print(f"  {overlap.prompt.count:,} have a prompt of it", markup=False)
        console.print(f"  {overlap.similar.count:,} resemble a row of it\n", markup=False)
    for finding in found.findings:
        console.print(_finding(finding))
    problems = sum(finding.level == "problem" for finding in found.findings)
    console.print(counted(problems, "problem") if problems else "no problems", style="bold")


def _finding(finding: Finding) -> Text:
    is_problem = finding.level == "problem"
    mark = ("✗ ", "bold red") if is_problem else ("· ", "dim")
    words = f"{finding.dataset}: {finding.what}: {finding.count:,}"
    rows = f" ({'; '.join(finding.rows)})" if finding.rows else ""
    advice = f". {finding.advice[:1].upper()}{finding.advice[1:]}" if finding.advice else ""
    return Text.assemble(mark, one_line(words), (one_line(rows), "dim"), one_line(advice))


def _lines(figures: DatasetFigures) -> Iterator[str]:
    first = "" if figures.all_rows else "the first "
    rows, sequences = counted(figures.rows, "row"), counted(figures.items, "sequence")
    share = f"{100 * figures.share_trained:.1f} % trained"
    yield f"{first}{rows}, {sequences}, {counted(figures.tokens, 'token')}, {share}"
    yield (
        f"equal to an earlier row: {figures.equal.count:,}; similar: {figures.similar.count:,}; "
        f"truncated: {figures.cut.count:,}"
    )
    if figures.labels:
        yield f"marked good: {figures.labels[True]:,}; marked bad: {figures.labels[False]:,}"
