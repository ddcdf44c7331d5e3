"""``surefoot eval``: evaluate a model on data it was not trained on."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .loading import loading
from .progress import progress

if TYPE_CHECKING:
    from ..inference import Generation, HeldOut, LoadedModel
    from ..parallel.section import ParallelSection
    from ..parallel.world import World
    from ..recipe.recipe import Recipe
    from ..storage.address import Address

BASE = "base"
UNSHOWN = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "sft_loss")


@dataclass(frozen=True)
class Result:
    """The results of one dataset."""

    name: str
    num_examples: int
    metrics: dict[str, float]  # loss, perplexity, token_accuracy, say
    answers: Sequence[Generation] = field(default=())

    @property
    def matches(self) -> int:
        """Number of responses that equal those of the data."""
        return sum(found.is_match for found in self.answers)

    def figures(self) -> dict[str, object]:
        """All of it except the texts; NaN and infinite values are null."""
        found: dict[str, object] = {"examples": self.num_examples}
        found |= {n: v if math.isfinite(v) else None for n, v in self.metrics.items()}
        if self.answers:
            found |= {"exact_match": self.matches / len(self.answers)}
            found |= {"matches": self.matches, "answers": len(self.answers)}
        return found


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
@click.option("--output", type=click.Path(path_type=Path), help="Where to write the generations.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def eval_(recipe: Path, overrides: tuple[str, ...], **options: object) -> None:
    """Evaluate the run of RECIPE on data that it was not trained on.

    The data is data.eval_datasets, or the rows that data.val_size holds out. Prints loss,
    perplexity and token accuracy; for stage dpo, how often the chosen response has the higher
    reward, and the margin. For conversations, the model also generates every response itself
    (section generate; greedy unless it samples). Exact match is the share of responses that equal
    the expected one, except for white space at the ends. All responses are written to
    generations-CHECKPOINT.jsonl in the run's folder.

    Without --model, the best checkpoint of the run is used if its recipe ends with that one,
    otherwise the latest. OVERRIDES are dotted fields such as generate.max_new_tokens=64. Those of
    parallel set the ranks over which to shard the model, whatever it was trained on, as in
    `surefoot predict`.
    """
    from ..recipe.prediction import parallel_of
    from ..recipe.recipe import load

    parallel, others = parallel_of(overrides)
    loaded = load(recipe, others)  # what is wrong with it is said before the slow imports
    with loading():
        from ..parallel.launch import launch, num_processes, rerun_command
        from ..parallel.section import ParallelSection
        from ..parallel.world import joined

    count = 1 if parallel == ParallelSection() else num_processes(parallel)
    if count > 1:
        raise SystemExit(launch(rerun_command(sys.argv[1:]), count))
    with loading():
        from ..parallel.generation_sharding import with_replicas

    parallel = with_replicas(parallel)
    with joined(parallel) as world:
        name, results = _results(loaded, options, world, parallel)
    if world.is_main:
        _tell(loaded, name, results, options)


def _results(
    loaded: Recipe, options: dict[str, object], world: World, parallel: ParallelSection
) -> tuple[str, list[Result]]:
    """A short name for the model, and its results; the same on all ranks."""
    with loading():
        from ..inference import adopt, held_out, references

    where = {"dataset": options["dataset"], "limit": options["limit"]}
    said = references(loaded, world=world, parallel=parallel, **where)  # type: ignore[arg-type]
    opened, name = _open(loaded, options, world, parallel)
    opened = adopt(opened, loaded)
    with world.main_first():  # which fills the cache
        parts = held_out(loaded, opened.codec, **where)  # type: ignore[arg-type]
    return name, [_evaluate(opened, loaded, part, said.get(part.name)) for part in parts]


def _tell(loaded: Recipe, name: str, results: Sequence[Result], options: dict[str, object]) -> None:
    written = None
    if any(result.answers for result in results):
        written = options["output"] or loaded.train.folder / f"generations-{name}.jsonl"
        write_generations(Path(str(written)), results)
    if options["as_json"]:
        click.echo(json.dumps(summary(name, results, written), indent=2))
    else:
        _print(name, results, written)


def _open(
    recipe: Recipe, options: dict[str, object], world: World, parallel: ParallelSection
) -> tuple[LoadedModel, str]:
    """The model to evaluate, and a short name for it."""
    from ..inference import locate, open_model, open_start

    model: str | None = options["model"]  # type: ignore[assignment]
    if model == BASE:
        return open_start(recipe, world=world, parallel=parallel), BASE
    with world.main_first():  # which downloads what is elsewhere
        located = locate(_path(recipe.train.output_dir, model))
    opened = open_model(
        located.folder,
        base=options["base"],  # type: ignore[arg-type]
        dtype=recipe.model.dtype,
        trust_remote_code=recipe.model.trust_remote_code,
        world=world,
        parallel=parallel,
    )
    return opened, located.folder.name


def _path(run: Address | Path, model: str | None) -> str:
    """The model to locate: the run itself, one of its checkpoints, or any other model."""
    from ..checkpoint.disk.commit import named
    from ..errors import CheckpointError

    if not isinstance(run, Path):
        is_own = model is not None and model.startswith("checkpoint-") and not Path(model).exists()
        return f"{run}/{model}" if is_own else model or str(run)
    if model is None:
        if not run.is_dir():
            raise CheckpointError(
                f"{run}: contains no trained model yet; run `surefoot train` first, or use "
                "--model base"
            )
        return str(run)
    if (run / model).is_dir():
        return str(run / model)
    if model.startswith("checkpoint-") and not Path(model).exists():
        known = ", ".join(path.name for path in named(run)) or "no checkpoint"
        raise CheckpointError(f"--model {model}: {run} has {known}")
    return model


def _evaluate(
    opened: LoadedModel, recipe: Recipe, part: HeldOut, said: list[list[float]] | None
) -> Result:
    from ..inference import generations, measure, num_batches

    count = len(part.examples)
    shown = opened.world.is_main
    with progress(f"{part.name}: loss", num_batches(recipe, count), is_shown=shown) as advance:
        metrics = measure(opened, recipe, part.examples, said=said, on_batch=lambda: advance(1))
    answers: list[Generation] = []
    if recipe.stage.uses_template:
        with progress(f"{part.name}: answers", count, is_shown=shown) as advance:
            answers = generations(opened, recipe, part.examples, on_answered=advance)
    return Result(part.name, count, metrics, answers)


def write_generations(path: Path, results: Sequence[Result]) -> None:
    """One JSON object per line: origin, prompt, reference, answer, match. Replaces an old file."""
    from ..errors import RunError
    from ..storage.files import make_folder, raising, write_aside

    lines = [
        json.dumps(
            {
                "origin": found.origin,
                "prompt": found.prompt,
                "reference": found.reference,
                "answer": found.answer,
                "match": found.is_match,
            },
            ensure_ascii=False,
        )
        for result in results
        for found in result.answers
    ]
    with raising(RunError, "cannot write the generations"):
        make_folder(path.absolute().parent)
        write_aside(path, ("\n".join(lines) + "\n").encode(errors="replace"))


def summary(name: str, results: Sequence[Result], written: object) -> dict[str, object]:
    """Everything as plain data: the totals, then each dataset.

    As in training, the loss and similar metrics of several datasets are means over the datasets;
    exact match is over all responses.
    """
    known = set.intersection(*(set(result.metrics) for result in results))
    means = {
        metric: sum(result.metrics[metric] for result in results) / len(results)
        for metric in results[0].metrics
        if metric in known
    }
    answers = [found for result in results for found in result.answers]
    whole = Result("", sum(result.num_examples for result in results), means, answers)
    return {
        "model": name,
        **whole.figures(),
        "generations": None if written is None else str(written),
        "datasets": {result.name: result.figures() for result in results},
    }


def _print(name: str, results: Sequence[Result], written: object) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table("dataset", title=f"{name} on held-out data", title_justify="left")
    metrics = [name for name in results[0].metrics if name not in UNSHOWN]
    for column in ("examples", *map(_heading, metrics)):
        table.add_column(column, justify="right")
    for result in results:
        values = (f"{result.metrics.get(metric, math.nan):.4f}" for metric in metrics)
        table.add_row(result.name, f"{result.num_examples:,}", *values)
    console.print(table)
    for result in results if len(results) > 1 else ():
        if result.answers:
            console.print(f"{result.name}: {match_line(result.answers)}", markup=False)
    if answers := [found for result in results for found in result.answers]:
        console.print(f"generations: {written}", style="dim", markup=False, soft_wrap=True)
        console.print(match_line(answers), style="bold")


def _heading(metric: str) -> str:
    return metric.removeprefix("rewards/").replace("_", " ")


def match_line(answers: Sequence[Generation]) -> str:
    """The line with the exact match."""
    matches = sum(found.is_match for found in answers)
    return f"exact match {100 * matches / len(answers):.1f} % ({matches}/{len(answers)})"
