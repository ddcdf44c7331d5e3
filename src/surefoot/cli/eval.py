"""``surefoot eval``: evaluate a model on data it was not trained on, or on tasks of lm-eval.

Heavy imports follow the checks of what was typed, and the start of the ranks, which repeat both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import RecipeError, RunError, installation
from .loading import loading, recipe_arguments, resolved_recipe, start_ranks
from .table import cell, console, progress, table
from .targets import ReadingCommand

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from ..batch import Classes
    from ..use import Generation
    from ..use.run_evaluation import EvaluationReport


_NOT_SHOWN = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "sft_loss")
# With the seven metrics of grpo, a terminal of 80 columns cut each of them short.
_MAX_COLUMNS = 5  # of metrics; with more, a row each


@click.command("eval", cls=ReadingCommand)
@recipe_arguments
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
@click.option("--similarity", is_flag=True, help="Also print BLEU-4, ROUGE and sacrebleu.")
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
def eval_(recipe: Path, overrides: tuple[str, ...], **options: Any) -> None:
    """Evaluate the run of RECIPE, its file or folder, on data that it was not trained on.

    The data is data.eval_datasets, or the rows that data.val_size holds out. Prints loss,
    perplexity and token accuracy; for stages dpo and rm, how often the chosen response has the
    higher reward, and the margin; for stage classify accuracy, F1, AUC and a table of confusion.
    For conversations, the model also generates every response itself (section generate; greedy
    unless it samples). Exact match is the share of responses that equal the expected one, except
    for white space at the ends. All responses are written to generations-CHECKPOINT.jsonl in the
    run's folder.

    If RECIPE is the folder of a checkpoint, that one is evaluated. Otherwise, without --model, the
    best checkpoint of the run is used if its recipe ends with that one, or else the latest.

    With --tasks, RECIPE is any model that `surefoot predict` accepts, and is measured on tasks of
    lm-eval (pip install -e '.[lm-eval]' in the clone of Surefoot). Results are written to --output
    (by default NAMES.jsonl), and the same command continues after a kill.

    OVERRIDES are dotted fields such as generate.max_new_tokens=64. Those of
    parallel set the ranks over which to shard the model, whatever it was trained on, as in
    `surefoot predict`.
    """
    if options["tasks"] is not None:
        _evaluate_on_tasks(str(recipe), overrides, options)
        return
    if options["include_path"] is not None:
        raise RecipeError("--include-path: has no effect without --tasks; remove it")
    if not _evaluated_as_its_program(recipe, overrides, options):
        _evaluate_on_held_out_data(recipe, overrides, options)


def _evaluated_as_its_program(
    path: Path, overrides: tuple[str, ...], options: Mapping[str, Any]
) -> bool:
    """Whether the file of another program asks for evaluations of that program's own, which are
    then done."""
    from ..recipe.recipe import convert, load_converted
    from ..run.resolving import resolved

    of_recipes = ("output", "base", "dataset", "limit")  # which that program's do not have
    if options["as_json"] or any(options[name] is not None for name in of_recipes):
        return False
    if (converted := convert((str(path), *overrides))) is None:
        return False
    model = options["model"] or (None if converted.extras.trains else "base")
    return converted.extras.evaluate(resolved(load_converted(converted)), model)


def _evaluate_on_held_out_data(
    path: Path, overrides: Sequence[str], options: Mapping[str, Any]
) -> None:
    from ..parallel.section import ParallelSection
    from ..recipe.files import is_checkpoint
    from ..recipe.prediction import parallel_of

    # What the recipe says under parallel was chosen for gradients and moments, three times the
    # memory of answers and more (docs/decisions/0035): the command line says it anew.
    parallel, others = parallel_of(overrides)
    recipe = resolved_recipe(path, others)
    if read_as := options.get("read_as"):  # of --model, which is not the recipe's
        recipe = replace(recipe, model=replace(recipe.model, reading=read_as))
    compare = None
    if options["similarity"]:  # which needs a package, so before the ranks start
        with loading():
            from ..use.run_evaluation import comparison

        compare = comparison()
    if parallel != ParallelSection():
        start_ranks(parallel, ["surefoot.use.run_evaluation"])
    with loading():
        from ..parallel.sharded_model import with_replicas
        from ..parallel.world import joined
        from ..use.run_evaluation import evaluate_run

    selection = {name: options[name] for name in ("model", "base", "dataset", "limit")}
    if selection["model"] is None and is_checkpoint(path):
        selection["model"] = str(path)
    parallel = with_replicas(parallel)
    with joined(parallel) as world:
        bar = partial(progress, is_shown=world.is_main)
        report = evaluate_run(recipe, world, parallel, progress=bar, **selection)
    if not world.is_main:
        return
    if compare is not None:
        report = report.compared(compare)
    generations, classes = None, recipe.stage.classes
    if report.answers:
        name = f"generations-{report.model}.jsonl"
        generations = options["output"] or recipe.train.folder / name
        try:
            report.write_generations(generations)
        except RunError:
            # The disk may be full, but the metrics are known.
            _show_report(report, None, classes, as_json=options["as_json"])
            raise
    _show_report(report, generations, classes, as_json=options["as_json"])


def _confusion_table(name: str, counts: Sequence[Sequence[str]]) -> RichTable:
    """How often each class, downwards, is predicted as which."""
    from rich.table import Table

    shown = Table(title=name, title_justify="left")
    for i, heading in enumerate(counts[0]):
        shown.add_column(cell(heading), justify="right" if i else "left")
    for row in counts[1:]:
        shown.add_row(*map(cell, row))
    return shown


def _show_report(
    report: EvaluationReport,
    generations: Path | None,
    classes: Classes | None,
    *,
    as_json: bool,
) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..training.class_metrics import confusion
    from ..training.class_metrics import table as confusions

    if as_json:
        click.echo(json.dumps(report.as_data(generations), indent=2))
        return
    tables = [(r.name, confusions(r.metrics, classes.names)) for r in report.results if classes]
    confused = {confusion(a, b) for a in classes.names for b in classes.names} if classes else ()
    metrics = [n for n in report.results[0].metrics if n not in (*_NOT_SHOWN, *confused)]
    headings = [name.removeprefix("rewards/").replace("_", " ") for name in metrics]
    rows = [["dataset", "examples", *headings]]
    for result in report.results:
        values = (f"{result.metrics.get(metric, math.nan):.4f}" for metric in metrics)
        rows.append([result.name, f"{result.num_examples:,}", *values])
    if len(metrics) > _MAX_COLUMNS:
        rows = [list(column) for column in zip(*rows, strict=True)]
    metric_table = Table(title=f"{report.model} on held-out data", title_justify="left")
    for i, heading in enumerate(rows[0]):
        metric_table.add_column(cell(heading), justify="right" if i else "left")
    for row in rows[1:]:
        metric_table.add_row(*map(cell, row))
    screen = Console(markup=False, highlight=False)
    screen.print(metric_table)
    for name, counts in tables:
        if counts:
            screen.print(_confusion_table(name, counts))
    if len(report.results) > 1:
        for result in report.results:
            if result.answers:
                screen.print(cell(f"{result.name}: {_exact_match(result.answers)}"))
    if generations is not None:
        screen.print(f"generations: {generations}", style="dim", soft_wrap=True)
    if report.similarity:
        scores = (f"{name} {value:.4f}" for name, value in report.similarity.items())
        screen.print(", ".join(scores))
    if report.answers:
        screen.print(_exact_match(report.answers), style="bold")


def _exact_match(answers: Sequence[Generation]) -> str:
    num_matches = sum(answer.is_match for answer in answers)
    percent = 100 * num_matches / len(answers)
    return f"exact match {percent:.1f} % ({num_matches}/{len(answers)})"


def _evaluate_on_tasks(path: str, overrides: Sequence[str], options: Mapping[str, Any]) -> None:
    """Run tasks of lm-eval, write the results of all rows and show the metrics. ``--model`` names
    another model than ``path``; a checkpoint by its name is of the run at ``path``."""
    from ..data.text.prompts import check_output, write_rows
    from ..recipe.prediction import load

    if options["dataset"] is not None:
        raise RecipeError("--dataset: has no effect on tasks; remove it")
    if not (names := [name.strip() for name in options["tasks"].split(",") if name.strip()]):
        raise RecipeError("--tasks: expected names of tasks, separated by commas")
    if (model := options["model"]) is not None:
        checkpoint = Path(path) / str(model)
        path = str(checkpoint if checkpoint.is_dir() else model)
    base = [] if options["base"] is None else [f"model.base={options['base']}"]
    prediction = load(path, [*overrides, *base])
    try:
        with loading():
            from ..use import harness
    except ImportError as error:
        raise RunError(
            f"--tasks needs {error.name}, which is not installed: {installation('lm_eval')}"
        ) from None
    is_chat = options["prompts"] == "chat"
    settings = harness.TaskSettings(
        names, options["include_path"], options["shots"], options["limit"], is_chat
    )
    output, force = options["output"] or Path(f"{'-'.join(names)}.jsonl"), options["force"]
    check_output(output, force=force)
    start_ranks(prediction.parallel, ["surefoot.use.prediction"])
    with loading():
        from ..parallel.sharded_model import with_replicas
        from ..parallel.world import joined
        from ..use.model_loading import open_predicted
        from ..use.prediction import Output

    journal, parallel = Output(output, force), with_replicas(prediction.parallel)
    with joined(parallel) as world:
        loaded = open_predicted(prediction.model, world, parallel)
        if is_chat and loaded.template is None:
            raise RecipeError("--prompts chat: the model has no chat template; write text")
        # generate.batch_size is that of the command line, or of the model's run
        section = load(path, overrides, generate=loaded.generate).generate
        results = harness.run_tasks(loaded, settings, output=journal, batch_size=section.batch_size)
        if world.is_main:
            write_rows(output, list(harness.sample_rows(results)), doing=journal.on_failure)
        world.wait()  # ranks of other machines remove their own
        if world.is_local_main:
            journal.remove_parts()
    if world.is_main:
        _show_tasks(results, output, as_json=options["as_json"])


def _show_tasks(task_results: Mapping[str, Any], path: Path, *, as_json: bool) -> None:
    if as_json:
        keys = [key for key in ("results", "groups", "versions") if key in task_results]
        summary = {key: task_results[key] for key in keys}
        click.echo(json.dumps({**summary, "samples": str(path)}, indent=2, default=str))
        return
    rich_table = table("task", "metric", "value", "error", numbers=("value", "error"))
    for task, metrics in task_results["results"].items():
        for key, value in metrics.items():
            name, _, kind = key.partition(",")
            if not isinstance(value, float) or name.endswith("_stderr"):
                continue
            error = metrics.get(f"{name}_stderr,{kind}")
            spread = f"{error:.4f}" if isinstance(error, float) else ""
            label = name if kind in ("", "none") else f"{name} ({kind})"
            rich_table.add_row(cell(task), cell(label), f"{value:.4f}", spread)
    console().print(rich_table)
    click.echo(f"results: {path}")
