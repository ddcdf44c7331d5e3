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

from ...cli.table import JSON, cell, console, frame, number, print_json, table
from ...errors import RecipeError, RunError, counted
from ...parallel.section import launched
from ...storage.folder_lock import lock
from ...terminal_text import visible

if TYPE_CHECKING:
    from .space import Space
    from .study import Results
    from .sweep import Sweep

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
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="K",
    help="Trials that run at once; GPUs and cores are divided among them.",
)
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
@click.option(
    "--prune-after",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    metavar="N",
    help="Complete trials of equal length that pruning needs.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the sampler.")
@JSON
def sweep(
    recipe: Path,
    ranges: tuple[str, ...],
    output: Path | None,
    jobs: int,
    as_json: bool,
    **given: Any,
) -> None:
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
        from .objective import choose_objective
        from .space import open_space
        from .sweep import LOCK, SPEC, SearchSettings, Sweep
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "optuna":
            raise
        raise RunError(
            "sweeps need optuna, which is not installed: pip install 'surefoot[sweep]'"
        ) from None
    if launched() is not None:
        raise RunError(
            "a sweep is one process, which starts the ranks of its trials; start it without "
            "torchrun or srun, and set parallel.num_processes"
        )
    space = open_space(recipe, ranges)
    keys = [key.key for key in space.keys]
    objective = choose_objective(space.base, keys, given.pop("metric"), given.pop("direction"))
    search = SearchSettings(
        num_trials=_num_trials(space, given.pop("trials"), given["sampler"]), **given
    )
    output = (output or _default_output(space)).absolute()
    taken = f"{output}: another process runs this sweep; wait for it, or choose another --output"
    with lock(output, RunError, doing="sweep", taken=taken, name=LOCK):
        is_resumed = (output / SPEC).exists()
        made = Sweep(output, space, objective, search, _environments(jobs), _tell)
        with contextlib.suppress(OSError):
            screen = Console(stderr=True, highlight=False)
            screen.print(frame(recipe, _facts(made, is_resumed=is_resumed)))
        found = made.run()
    if as_json:
        print_json({"output": str(output), **found.as_data()})
    else:
        _show(found, output)
    _exit(made, found)


def _default_output(space: Space) -> Path:
    folder = space.base.train.output_dir
    if not isinstance(folder, Path):
        raise RunError(
            f"train.output_dir: {folder} is a URL, and the trials of a sweep are in a local "
            "folder; name it with --output"
        )
    return folder.with_name(f"{folder.name}-sweep")


def _num_trials(space: Space, trials: int | None, sampler: str) -> int:
    if sampler != "grid":
        return trials or _TRIALS
    if space.size is None:
        endless = next(key for key in space.keys if key.values() is None)
        raise RecipeError(
            f"{endless.argument}: a grid needs values that can be counted; list them "
            "(1e-5,1e-4,1e-3), give a step (0..0.5:0.1), or use --sampler random"
        )
    return min(trials or space.size, space.size)


def _environments(jobs: int) -> list[dict[str, str]]:
    """What each of ``jobs`` trials at once may use: its share of the GPUs and of the cores.
    Trials share a GPU if there are fewer than trials."""
    if jobs == 1:
        return [{}]
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        devices = [one.strip() for one in visible.split(",") if one.strip()]
    else:
        import torch

        devices = [str(number) for number in range(torch.cuda.device_count())]
    size, cores = len(devices) // jobs, max(1, len(os.sched_getaffinity(0)) // jobs)
    found: list[dict[str, str]] = [{} for _ in range(jobs)]
    for job, one in enumerate(found):
        if devices:
            mine = devices[job * size : (job + 1) * size] or [devices[job % len(devices)]]
            one["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        if "OMP_NUM_THREADS" not in os.environ:
            one["OMP_NUM_THREADS"] = str(cores)
    return found


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed
        click.echo(visible(line), err=True)


def _facts(made: Sweep, *, is_resumed: bool) -> Iterator[tuple[str, object]]:
    space, search = made.space, made.search
    for key in space.keys:
        yield key.key, key.text
    yield "objective", made.objective
    if "train.seed" not in [key.key for key in space.keys]:
        yield "seed of training", f"{space.base.train.seed}, the same in every trial"
    sampler = f"{search.sampler}, seed {search.seed}"
    yield "sampler", "grid, in order" if search.sampler == "grid" else sampler
    if search.pruner != "none":
        after = counted(search.prune_after, "complete trial")
        yield "pruner", f"{search.pruner}, from {after} of equal length"
    jobs = f", {len(made.environments)} at once" if len(made.environments) > 1 else ""
    yield "trials", f"{search.num_trials}{jobs}{', resumed' if is_resumed else ''}"
    yield "output", made.output


def _show(found: Results, output: Path) -> None:
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
    following = f"next: surefoot train {shlex.quote(str(output / 'best.yaml'))}"
    screen.print(cell(following), soft_wrap=True)


def _table(found: Results) -> Table:
    """Complete trials from the best, then the others by number."""
    keys = list(found.trials[0].values)
    names = [key.rpartition(".")[2] for key in keys]
    titles = [key if names.count(name) > 1 else name for key, name in zip(keys, names, strict=True)]
    numbers = ["trial", found.metric, "step", *titles]
    made = table("trial", found.metric, "step", *titles, "state", numbers=numbers)
    for one in [*found.complete, *(one for one in found.trials if one.state != "complete")]:
        values = [
            cell(f"{value:.4g}" if isinstance(value, float) else value)
            for value in one.values.values()
        ]
        reason = f": {one.reason}" if one.reason else ""
        state = Text.assemble((one.state, _STYLES.get(one.state, "")), cell(reason))
        step = "" if one.step is None else f"{one.step:,}"
        best = "bold" if one == found.best else ""
        made.add_row(str(one.number), number(one.value), step, *values, state, style=best)
    return made


def _exit(made: Sweep, found: Results) -> None:
    """Exit as a run does: 128 + a signal's number; 2 if no trial has a result."""
    if made.signal is not None:
        _tell(f"stopped by {made.signal.name}; run the same command to resume")
        raise SystemExit(128 + made.signal)
    left = [str(one.number) for one in found.trials if one.state == "half-run"]
    if left:
        half = counted(len(left), "trial is", "trials are")
        raise RunError(f"{half} half-run ({', '.join(left)}); run the same command to resume")
    if found.best is None:
        first = next((one.reason for one in found.trials if one.reason), "")
        raise RunError(f"no trial has a result; the first failed: {first}")
