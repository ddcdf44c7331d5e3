"""The data of a recipe before a run: ``preview``, ``data check``, ``encode`` and ``download``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.text import Text

from ..errors import DataError, RunError, counted
from ..terminal_text import one_line, visible
from .loading import TakesWords, is_option, loading, recipe_arguments, resolved_recipe

if TYPE_CHECKING:
    from ..data.text.preview import PreviewExample
    from ..run.parts import RunParts
    from ..use.data_check.check import DataCheck
    from ..use.data_check.figures import DatasetFigures

ROWS = 2000  # of each dataset, unless all are asked for; said in the help, before slow imports
LEARNT, REJECTED = "bold green", "bold red"
WIDTH = 40  # characters of the longest bar of the histogram
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def _parts(recipe: Path, overrides: tuple[str, ...]) -> RunParts:
    """What the run is made of; no weights are read."""
    loaded = resolved_recipe(recipe, overrides)
    with loading():
        from ..run.parts import RunParts
    return RunParts.unopened(loaded)


@click.command(cls=TakesWords)
@recipe_arguments
@click.option(
    "-n",
    "count",
    default=3,
    type=click.IntRange(0),
    help="Number of examples to show of each dataset.",
)
@click.option("--dataset", help="Only this dataset.")
@click.option("--all", "all_rows", is_flag=True, help=f"Read all rows, not the first {ROWS:,}.")
@_JSON
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

    OVERRIDES are dotted fields such as data.cutoff_len=512. RECIPE and OVERRIDES can also be what
    `surefoot train` takes: a file of LLaMA-Factory, or its words, --stage sft ...; their --dataset
    is then LLaMA-Factory's.
    """
    if dataset is not None and is_option(recipe):
        overrides, dataset = (*overrides, "--dataset", dataset), None
    parts = _parts(recipe, overrides)
    with loading():
        from ..use.data_check.check import preview_data
        from .preview_page import examples_page, write_page

    limit, cutoff_len = None if all_rows else ROWS, parts.codec.section.longest
    datasets = preview_data(parts, dataset=dataset, count=count, limit=limit)
    if page is not None:
        write_page(page, examples_page(datasets, str(recipe), cutoff_len))
        click.echo(f"written to {page}", err=True)
    if as_json:
        _print_json(
            {"cutoff_len": cutoff_len, "datasets": [figures.as_data() for figures in datasets]}
        )
    if page is not None or as_json:
        return
    console = Console(markup=False, soft_wrap=True, highlight=False)
    for figures in datasets:
        show(console, figures, cutoff_len)
    if empty := [figures.name for figures in datasets if figures.rows and not figures.items]:
        raise DataError(f"{', '.join(empty)}: none of the rows above has trained tokens")


@click.group()
def data() -> None:
    """Check the rows of a recipe before training, or convert rows of another program."""


@data.command()
@recipe_arguments
@click.option("--dataset", help="Only this dataset.")
@click.option("--rows", type=click.IntRange(1), help="Read at most so many rows of each dataset.")
@_JSON
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
    rows, rows of the evaluation data that are in the training data, responses that are empty or
    repeated, and conversations with an odd order of turns. Nothing is trained, and no weights are
    read.

    The exit code is 0 without problems, 1 with problems, and 2 if the data cannot be read.

    OVERRIDES are dotted fields such as data.cutoff_len=512.
    """
    parts = _parts(recipe, overrides)
    with loading():
        from ..use.data_check.check import check_data

    report = check_data(parts, dataset=dataset, limit=rows)
    if as_json:
        _print_json(report.as_data())
    else:
        _show_check(Console(markup=False, soft_wrap=True, highlight=False), report)
    if report.has_problems:
        raise click.exceptions.Exit(1)


@data.command()
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
def convert(source: Path, output: Path) -> None:
    """Write the rows of SOURCE, a file of another program, to OUTPUT as JSON Lines.

    SOURCE is a .mindrecord file, which needs the package mindspore. Its columns are kept: a file
    of input_ids gives rows of token ids, which data.datasets takes as they are.
    """
    from ..data.rows.catalog import other_rows
    from ..storage.files import open_log, raising

    if output.exists():
        raise RunError(f"{output}: exists; choose another name")
    rows = other_rows(source)
    part, count = output.with_name(f".{output.name}.part"), 0
    with raising(RunError, "cannot write the rows"):
        with open_log(part, is_empty=True) as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                count += 1
        part.replace(output)
    click.echo(f"{output}: {counted(count, 'row')}")


@click.command()
@recipe_arguments
def encode(recipe: Path, overrides: tuple[str, ...]) -> None:
    """Encode the datasets of RECIPE into the cache, where training finds them.

    Use it, for example, on a machine with cheap processors before you rent one with a GPU;
    data.cache_dir is then a folder that both can read. With data.streaming, training can start
    before the encoding has ended. Datasets that are already in the cache are not encoded again.

    OVERRIDES are dotted fields such as data.cutoff_len=512.
    """
    from ..recipe.recipe_data import encode_datasets

    for line in encode_datasets(_parts(recipe, overrides).encoding).lines():
        click.echo(visible(line))


@click.command()
@recipe_arguments
def download(recipe: Path, overrides: tuple[str, ...]) -> None:
    """Download the model and the datasets of RECIPE, so that it also runs without a network.

    What is on this machine already is only checked. An interrupted download is resumed by the same
    command. Every file is verified by the hash that its hub announces. Afterwards, HF_HUB_OFFLINE=1
    forbids any further request.

    OVERRIDES are dotted fields such as model.hub=modelscope.
    """
    loaded = resolved_recipe(recipe, overrides)
    with loading():
        from ..data.rows.catalog import Catalog
        from ..recipe.recipe_data import find_base

    base = find_base(loaded, weights=not loaded.model.new_weights)
    click.echo(visible(f"model: {base}"))
    for entry in Catalog(loaded.data).entries:
        entry.source.stamp()
        click.echo(visible(f"{entry.name}: {entry.source}"))


def _print_json(value: object) -> None:
    click.echo(visible(json.dumps(value, ensure_ascii=False, indent=2)))


def show(console: Console, figures: DatasetFigures, cutoff_len: int) -> None:
    """Print examples, a legend and statistics."""
    from ..use.data_check.findings import findings_in

    for shown in figures.shown:
        _show_example(console, shown)
    if any(shown.items for shown in figures.shown):
        legend = Text.assemble(("trained", LEARNT), "  ", ("masked", "dim"))
        if not console.is_terminal:
            legend = Text("[[ ]]: trained; everything else is masked")
        console.print(legend, end="\n\n")
    lines = [", ".join(figures.totals), *map(str, findings_in(figures))]
    _show_lines(console, figures, lines, cutoff_len)


def _show_lines(
    console: Console, figures: DatasetFigures, lines: Iterable[str], cutoff_len: int
) -> None:
    console.print(Text(one_line(figures.name), style="bold"))
    for line in (*lines, *histogram(figures.lengths, cutoff_len)):
        console.print(f"  {one_line(line)}")
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


def histogram(lengths: Iterable[int], cutoff_len: int) -> Iterator[str]:
    """Lines with bars, and the position of ``cutoff_len`` among the lengths, or counts of them."""
    from ..use.data_check.figures import length_bins, quantiles

    counts = Counter(lengths)
    bins = length_bins(counts, cutoff_len)
    if not bins:
        return
    shares = quantiles(counts)
    longest = shares[1.0]
    yield (
        f"tokens of a sequence before truncation: median {shares[0.5]:,}, 95 % up to "
        f"{shares[0.95]:,}, longest {longest:,}"
    )
    most = max(each.count for each in bins)
    for each in bins:
        bar = "█" * -(-each.count * WIDTH // most)
        yield f"{f'{each.above + 1:,} to {each.most:,}':>20} {bar} {each.count:,}"
        if each.most == cutoff_len < longest:
            yield f"{'':>20} {'─' * 6} data.cutoff_len {cutoff_len:,} {'─' * 6}"
    if longest <= cutoff_len:
        yield f"no sequence is longer than data.cutoff_len {cutoff_len:,}"


def _show_check(console: Console, report: DataCheck) -> None:
    for figures in report.datasets:
        _show_lines(console, figures, _checked(figures), report.cutoff_len)
    for overlap in report.overlaps:
        console.print(Text(one_line(f"evaluation data: {overlap.evaluation}"), style="bold"))
        of = f"of {counted(overlap.rows, 'row')}"
        console.print(f"  {overlap.same.count:,} {of} are in the training data")
        console.print(f"  {overlap.prompt.count:,} have a prompt of it\n")
    for finding in report.findings:
        mark = ("✗ ", "bold red") if finding.level == "problem" else ("· ", "dim")
        console.print(Text.assemble(mark, one_line(f"{finding.dataset}: {finding}")))
    problems = sum(finding.level == "problem" for finding in report.findings)
    console.print(counted(problems, "problem") if problems else "no problems", style="bold")


def _checked(figures: DatasetFigures) -> Iterator[str]:
    first = "" if figures.all_rows else "the first "
    rows, sequences = counted(figures.rows, "row"), counted(figures.items, "sequence")
    share = f"{100 * figures.share_trained:.1f} % trained"
    yield f"{first}{rows}, {sequences}, {counted(figures.tokens, 'token')}, {share}"
    yield f"equal to an earlier row: {figures.equal.count:,}; truncated: {figures.cut.count:,}"
    if figures.labels:
        yield f"marked good: {figures.labels[True]:,}; marked bad: {figures.labels[False]:,}"
