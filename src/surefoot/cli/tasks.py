"""``surefoot eval --tasks``: tasks of lm-eval."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import RecipeError, RunError
from .loading import loading, start_ranks
from .table import cell, console, table

if TYPE_CHECKING:
    from ..parallel.world import World
    from ..recipe.prediction import Prediction
    from ..use.benchmarks.harness import TaskSettings
    from ..use.model_loading import LoadedModel


@dataclass(frozen=True)
class TaskCommand:
    """The command line, without what it says of tasks."""

    path: str
    overrides: Sequence[str]
    output: Path | None
    force: bool
    as_json: bool
    limit: int | None


def run_tasks(asked: TaskCommand, options: Mapping[str, Any]) -> None:
    """Run the tasks, write the results of all rows and show the metrics."""
    from ..data.text.prompts import check_output

    prediction = _prediction(asked, options)
    settings = _settings(asked, options)
    path = asked.output or Path(f"{'-'.join(settings.names)}.jsonl")
    check_output(path, force=asked.force)
    start_ranks(prediction.parallel)
    with loading():
        from ..data.text.prompts import write_rows
        from ..parallel.sharded_model import with_replicas
        from ..parallel.world import joined
        from ..use.answer_journal import Output
        from ..use.benchmarks import harness

    output = Output(path, asked.force)
    with joined(with_replicas(prediction.parallel)) as world:
        opened, size = _open(prediction, asked, world)
        if settings.is_chat and opened.template is None:
            raise RecipeError("--prompts chat: the model has no chat template; write text")
        found = harness.run_tasks(opened, settings, output=output, batch_size=size)
        if world.is_main:
            write_rows(path, list(harness.sample_rows(found)), doing=output.on_failure)
        world.wait()  # ranks of other machines remove their own
        if world.is_local_main:
            output.remove_parts()
    if world.is_main:
        _show(found, path, as_json=asked.as_json)


def _prediction(asked: TaskCommand, options: Mapping[str, Any]) -> Prediction:
    """The model to open. ``--model`` names another one than PATH; a checkpoint by its name is of
    the run at PATH. Raises ``RecipeError``: an option has no effect here."""
    from ..recipe.prediction import load

    if options["dataset"] is not None:
        raise RecipeError("--dataset: has no effect on tasks; remove it")
    path, model = asked.path, options["model"]
    if model is not None:
        own = Path(path) / str(model)
        path = str(own if own.is_dir() else model)
    base = [] if options["base"] is None else [f"model.base={options['base']}"]
    return load(path, [*asked.overrides, *base])


def _open(prediction: Prediction, asked: TaskCommand, world: World) -> tuple[LoadedModel, int]:
    """The model, and ``generate.batch_size`` of its run or of the command line."""
    from ..parallel.sharded_model import with_replicas
    from ..recipe.prediction import load
    from ..use.model_loading import open_model

    parallel = with_replicas(prediction.parallel)
    opened = open_model(**asdict(prediction.model), world=world, parallel=parallel)
    section = load(prediction.model.path, asked.overrides, generate=opened.generate).generate
    return opened, section.batch_size


def _settings(asked: TaskCommand, options: Mapping[str, Any]) -> TaskSettings:
    """The tasks of the command line. Raises ``RunError``: lm-eval is not installed."""
    try:
        with loading():
            from ..use.benchmarks.harness import TaskSettings
    except ImportError as error:
        raise RunError(
            f"--tasks needs the package {error.name}; install it: pip install 'surefoot[lm-eval]'"
        ) from None
    names = [name.strip() for name in options["tasks"].split(",") if name.strip()]
    if not names:
        raise RecipeError("--tasks: expected names of tasks, separated by commas")
    return TaskSettings(
        names, options["include_path"], options["shots"], asked.limit, options["prompts"] == "chat"
    )


def _show(found: Mapping[str, Any], path: Path, *, as_json: bool) -> None:
    if as_json:
        kept = {name: found[name] for name in ("results", "groups", "versions") if name in found}
        click.echo(json.dumps({**kept, "samples": str(path)}, indent=2, default=str))
        return
    shown = table("task", "metric", "value", "error", numbers=("value", "error"))
    for task, metrics in found["results"].items():
        for key, value in metrics.items():
            name, _, kind = key.partition(",")
            if not isinstance(value, float) or name.endswith("_stderr"):
                continue
            error = metrics.get(f"{name}_stderr,{kind}")
            spread = f"{error:.4f}" if isinstance(error, float) else ""
            label = name if kind in ("", "none") else f"{name} ({kind})"
            shown.add_row(cell(task), cell(label), f"{value:.4f}", spread)
    console().print(shown)
    click.echo(f"results: {path}")
