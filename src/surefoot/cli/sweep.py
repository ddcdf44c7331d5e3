"""``surefoot sweep``: trials of a recipe with other settings, and the best of them."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import RunError, counted
from ..terminal_text import visible
from .table import cell, console, frame, number, print_json, table

if TYPE_CHECKING:
    from ..sweep.opening import PreparedSweep
    from ..sweep.results import Results
    from ..sweep.sweep import Sweep

_TRIALS = 20
_STYLES = {"failed": "red", "pruned": "dim", "half-run": "yellow"}


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("ranges", nargs=-1, metavar="KEY=RANGE...")
@click.option(
    "--trials",
    type=click.IntRange(1),
    metavar="N",
    help=f"Trials in all, over all starts; default: {_TRIALS}, or the complete grid.",
)
@click.option(
    "--sampler",
    type=click.Choice(["tpe", "random", "grid"]),
    default="tpe",
    show_default=True,
    help="How values are chosen: near the best ones so far, at random, or all of them in order.",
)
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, metavar="K",
              help="Trials that run at once; GPUs and cores are divided among them.")  # fmt: skip
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the sweep; default: the recipe's train.output_dir with -sweep.",
)
@click.option("--metric", help="Metric of the runs that decides; default: the held-out one.")
@click.option(
    "--direction",
    type=click.Choice(["minimize", "maximize"]),
    help="Default: minimize what ends in loss or perplexity, maximize everything else.",
)
@click.option(
    "--pruner",
    type=click.Choice(["none", "median"]),
    default="none",
    show_default=True,
    help="median: end a trial that is worse than the median of complete ones at the same step.",
)
@click.option("--prune-after", type=click.IntRange(1), default=4, show_default=True, metavar="N",
              help="Complete trials of equal length that pruning needs.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the sampler.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def sweep(recipe: Path, ranges: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Train RECIPE with other settings, several times, and find the best ones.

    \b
    surefoot sweep recipe.yaml optim.adamw.learning_rate=1e-5..1e-3:log \\
        method.lora.rank=8,16,32 --trials 20

    A RANGE is LOW..HIGH, LOW..HIGH:log, LOW..HIGH:STEP, or values such as 8,16,32. A KEY with a
    single value holds for all trials.

    Each trial is an ordinary run in a folder of its own. A sweep that was stopped or killed is
    resumed by the same command: half-run trials first, from their latest checkpoints.
    """
    try:
        from ..sweep import files
        from ..sweep.opening import SweepOptions, begin, prepare, study_exists
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "optuna":
            raise
        raise RunError(
            "sweeps need optuna, which is not installed: pip install 'surefoot[sweep]'"
        ) from None

    prepared = prepare(recipe, ranges, SweepOptions(**options))
    with files.locked(prepared.output):
        is_resumed = study_exists(prepared.output)
        made = begin(prepared, _devices(prepared.jobs), _tell)
        with contextlib.suppress(OSError):
            screen = Console(stderr=True, highlight=False)
            screen.print(frame(recipe, _facts(prepared, is_resumed)))
        found = made.run()
    if as_json:
        print_json({"output": str(prepared.output), **found.as_data()})
    else:
        show(found, prepared.output)
    _exit(made, found)


def _devices(jobs: int) -> list[str]:
    """The GPUs to divide among several trials at once."""
    if jobs == 1:
        return []
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [one.strip() for one in visible.split(",") if one.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed
        click.echo(visible(line), err=True)


def _facts(prepared: PreparedSweep, is_resumed: bool) -> Iterator[tuple[str, object]]:
    space, search = prepared.space, prepared.search
    for key in space.keys:
        yield key.key, key.text
    yield "objective", prepared.objective
    seeds = [key for key in space.keys if key.key == "train.seed"]
    if not seeds:
        yield "seed of training", f"{space.base.train.seed}, the same in every trial"
    sampler = f"{search.sampler}, seed {search.seed}"
    yield "sampler", "grid, in order" if search.sampler == "grid" else sampler
    if search.pruner != "none":
        after = counted(search.prune_after, "complete trial")
        yield "pruner", f"{search.pruner}, from {after} of equal length"
    jobs = f", {prepared.jobs} at once" if prepared.jobs > 1 else ""
    yield "trials", f"{prepared.trials}{jobs}{', resumed' if is_resumed else ''}"
    yield "output", prepared.output


def show(found: Results, output: Path) -> None:
    """Print all trials, the importance of each setting, remarks, and the best recipe."""
    screen = console()
    if found.trials:
        screen.print(_table(found))
    for key, share in found.importance.items():
        trials = counted(len(found.complete), "complete trial")
        screen.print(f"importance: {key} {100 * share:.0f} % (by {trials})", soft_wrap=True)
    for remark in found.remarks:
        screen.print(cell(f"note: {remark}"), soft_wrap=True)
    if (best := found.best) is None:
        return
    screen.print()
    line = f"best: trial {best.number}, {found.metric} {number(best.value)} at step {best.step}"
    screen.print(cell(line), style="bold", soft_wrap=True)
    screen.print(
        cell(f"next: surefoot train {shlex.quote(str(output / 'best.yaml'))}"), soft_wrap=True
    )


def _table(found: Results) -> Table:
    keys = list(found.trials[0].values)
    names = [key.rpartition(".")[2] for key in keys]
    titles = [key if names.count(name) > 1 else name for key, name in zip(keys, names, strict=True)]
    numbers = ["trial", found.metric, "step", *titles]
    made = table("trial", found.metric, "step", *titles, "state", numbers=numbers)
    for one in found.ranked():
        values = [_value(one.values[key]) for key in keys]
        reason = f": {one.reason}" if one.reason else ""
        state = Text.assemble((one.state, _STYLES.get(one.state, "")), cell(reason))
        step = "" if one.step is None else f"{one.step:,}"
        best = "bold" if one == found.best else ""
        made.add_row(str(one.number), number(one.value), step, *values, state, style=best)
    return made


def _value(value: object) -> Text:
    return cell(f"{value:.4g}" if isinstance(value, float) else value)


def _exit(made: Sweep, found: Results) -> None:
    """Exit as a run does: 128 + a signal's number; 2 if no trial has a result."""
    if made.signal is not None:
        _tell(f"stopped by {made.signal.name}; run the same command to resume")
        raise SystemExit(128 + made.signal)
    left = [one.number for one in found.trials if one.state == "half-run"]
    if left:
        half = counted(len(left), "trial is", "trials are")
        raise RunError(f"{half} half-run ({', '.join(map(str, left))}); run the same command to "
                       "resume")  # fmt: skip
    if found.best is None:
        first = next((one.reason for one in found.trials if one.reason), "")
        raise RunError(f"no trial has a result; the first failed: {first}")
