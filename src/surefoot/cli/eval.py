"""``surefoot eval``: evaluate a model on data it was not trained on."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import RecipeError, RunError
from .loading import loading, resolved_recipe, start_ranks
from .table import cell, progress
from .tasks import TaskCommand, run_tasks

if TYPE_CHECKING:
    from ..use import Generation
    from ..use.run_evaluation import Compare, EvaluationReport

UNSHOWN = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "sft_loss")
MOST_COLUMNS = 5  # of metrics; with more, a row each


@click.command("eval")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option(
    "--model",
    help="A checkpoint (checkpoint-60 is enough), or any model; base: the recipe's model before "
    "training.",
)
@click.option("--base", help="The base model of an adapter, if it moved.")
@click.option("--dataset", help="Evaluate on this dataset instead.")
@click.option("--limit", type=click.IntRange(1), help="Only the first N examples of each dataset.")
@click.option("--output", type=click.Path(path_type=Path), help="Where to write the results.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--tasks", help="Tasks of lm-eval instead, separated by commas.")
@click.option(
    "--include-path",
    type=click.Path(path_type=Path),
    help="A folder with YAML files of further tasks.",
)
@click.option(
    "--similarity",
    is_flag=True,
    help="Also print BLEU-4, ROUGE and sacrebleu.",
)
@click.option(
    "--shots", type=click.IntRange(0), help="Examples before each row of a task; unset, its own."
)
@click.option(
    "--prompts",
    type=click.Choice(["chat", "text"]),
    default="text",
    show_default=True,
    help="Rows of tasks as turns of a conversation, or as one text.",
)
@click.option("--force", is_flag=True, help="Replace the results of --tasks.")
def eval_(
    recipe: Path,
    overrides: tuple[str, ...],
    *,
    output: Path | None,
    as_json: bool,
    force: bool,
    **options: Any,
) -> None:
    """Evaluate the run of RECIPE, its file or folder, on data that it was not trained on.

    The data is data.eval_datasets, or the rows that data.val_size holds out. Prints loss,
    perplexity and token accuracy; for stages dpo and rm, how often the chosen response has the
    higher reward, and the margin. For conversations, the model also generates every response itself
    (section generate; greedy unless it samples). Exact match is the share of responses that equal
    the expected one, except for white space at the ends. All responses are written to
    generations-CHECKPOINT.jsonl in the run's folder.

    If RECIPE is the folder of a checkpoint, that one is evaluated. Otherwise, without --model, the
    best checkpoint of the run is used if its recipe ends with that one, or else the latest.

    With --tasks, RECIPE is any model that `surefoot predict` accepts, and is measured on tasks of
    lm-eval (pip install 'surefoot[lm-eval]'). Results are written to --output (by default
    NAMES.jsonl), and the same command continues after a kill.

    OVERRIDES are dotted fields such as generate.max_new_tokens=64. Those of
    parallel set the ranks over which to shard the model, whatever it was trained on, as in
    `surefoot predict`.
    """
    if options["tasks"] is not None:
        command = TaskCommand(str(recipe), overrides, output, force, as_json, options["limit"])
        run_tasks(command, options)
        return
    if options["include_path"] is not None:
        raise RecipeError("--include-path: has no effect without --tasks; remove it")
    if output is None and not as_json and _as_its_program(recipe, overrides, options):
        return
    compare = comparison() if options["similarity"] else None
    held = {name: options[name] for name in ("model", "base", "dataset", "limit")}
    _of_recipe(recipe, overrides, output=output, as_json=as_json, compare=compare, options=held)


def _as_its_program(recipe: Path, overrides: tuple[str, ...], options: dict[str, Any]) -> bool:
    """Whether the file of another program asks for evaluations of that program's own, which are
    then done."""
    from ..recipe.importers import convert
    from ..recipe.recipe import load_converted
    from ..run.resolving import resolved

    if any(options[name] is not None for name in ("base", "dataset", "limit")):
        return False
    if (converted := convert((str(recipe), *overrides))) is None:
        return False
    model = options["model"] or (None if converted.extras.trains else "base")
    return converted.extras.evaluate(resolved(load_converted(converted)), model)


def comparison() -> Compare:
    """BLEU and ROUGE. Raises ``RunError``: their packages are not installed."""
    try:
        from ..use.benchmarks.text_similarity import similarity
    except ImportError as error:
        raise RunError(
            f"BLEU and ROUGE need the package {error.name}; install it: "
            "pip install 'surefoot[metrics]'"
        ) from None
    return similarity


def _of_recipe(
    recipe: Path,
    overrides: tuple[str, ...],
    *,
    output: Path | None,
    as_json: bool,
    compare: Compare | None,
    options: dict[str, Any],
) -> None:
    """Evaluate the model of a recipe on held-out data."""
    from ..recipe.files import is_checkpoint
    from ..recipe.prediction import parallel_of

    if options["model"] is None and is_checkpoint(recipe):
        options["model"] = str(recipe)
    parallel, others = parallel_of(overrides)
    loaded = resolved_recipe(recipe, others)
    with loading():
        from ..parallel.section import ParallelSection
        from ..parallel.world import joined

    if parallel != ParallelSection():
        start_ranks(parallel)
    with loading():
        from ..parallel.sharded_model import with_replicas

    parallel = with_replicas(parallel)
    with joined(parallel) as world:
        with loading():
            from ..use.run_evaluation import evaluate_run

        shown = partial(progress, is_shown=world.is_main)
        report = evaluate_run(loaded, world, parallel, progress=shown, **options)
    if not world.is_main:
        return
    if compare is not None:
        report = report.compared(compare)
    path = None
    if report.answers:
        path = output or loaded.train.folder / f"generations-{report.model}.jsonl"
    try:
        if path is not None:
            report.write_generations(path)
    except RunError:
        _show(report, None, as_json=as_json)  # the disk may be full, but the metrics are known
        raise
    _show(report, path, as_json=as_json)


def _show(report: EvaluationReport, written: Path | None, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(report.as_data(written), indent=2))
    else:
        _print(report, written)


def _print(report: EvaluationReport, written: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    results = report.results
    metrics = [name for name in results[0].metrics if name not in UNSHOWN]
    headings = [name.removeprefix("rewards/").replace("_", " ") for name in metrics]
    lines = [["dataset", "examples", *headings]]
    for result in results:
        values = (f"{result.metrics.get(metric, math.nan):.4f}" for metric in metrics)
        lines.append([result.name, f"{result.num_examples:,}", *values])
    if len(metrics) > MOST_COLUMNS:
        lines = [list(row) for row in zip(*lines, strict=True)]
    table = Table(title=f"{report.model} on held-out data", title_justify="left")
    for number, heading in enumerate(lines[0]):
        table.add_column(cell(heading), justify="right" if number else "left")
    for line in lines[1:]:
        table.add_row(*map(cell, line))
    console.print(table)
    for result in results if len(results) > 1 else ():
        if result.answers:
            console.print(cell(f"{result.name}: {match_line(result.answers)}"))
    if written is not None:
        console.print(f"generations: {written}", style="dim", markup=False, soft_wrap=True)
    if report.similarity:
        figures = (f"{name} {value:.4f}" for name, value in report.similarity.items())
        console.print(", ".join(figures))
    if answers := report.answers:
        console.print(match_line(answers), style="bold")


def match_line(answers: Sequence[Generation]) -> str:
    """The line with the exact match."""
    matches = sum(found.is_match for found in answers)
    return f"exact match {100 * matches / len(answers):.1f} % ({matches}/{len(answers)})"
