"""``surefoot sweep``: trials of a recipe with other settings, and the best of them."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from ...cli.table import JSON, cell, console, frame, number, print_json, table
from ...errors import RecipeError, RunError, counted, installation
from ...parallel.section import launched
from ...storage.cgroups import usable_cores
from ...storage.child import LAUNCHER
from ...storage.folder_lock import lock
from ...terminal_text import visible
from ...training.callbacks.launches import start_training

if TYPE_CHECKING:
    from signal import Signals

    from .space import Space
    from .study import Results
    from .sweep import StartTrial

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
    "--on", type=click.Choice(["ray"]), help="Run the trials on a cluster; default: here."
)
@click.option(
    "--gpus",
    type=click.IntRange(0),
    metavar="G",
    help="With --on: GPUs of each trial, on one node; default: those of the cluster are divided.",
)
@click.option(
    "--cpus",
    type=click.IntRange(1),
    metavar="C",
    help="With --on: CPUs of each trial; default: one for each GPU, or they are divided.",
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
    as_json: bool,
    **options: Any,
) -> None:
    """Train RECIPE with other settings, several times, and find the best ones.

    \b
    surefoot sweep recipe.yaml optim.adamw.learning_rate=1e-5..1e-3:log \\
        method.lora.rank=8,16,32 --trials 20

    A RANGE is LOW..HIGH, LOW..HIGH:log, or values such as 8,16,32. A KEY with a single value
    holds for all trials.

    Each trial is an ordinary run in a folder of its own. A sweep that was stopped or killed is
    resumed by the same command: half-run trials first, from their latest checkpoints.

    With --on ray, each trial runs on one node of a Ray cluster, and resumes on another one if that
    node is lost. All nodes need the folder of the sweep on one disk.
    """
    try:
        from .objective import choose_objective
        from .space import open_space
        from .study import STUDY
        from .sweep import LOCK, SearchSettings, Sweep
    except ModuleNotFoundError as error:
        raise RunError(
            f"sweeps need {error.name}, which is not installed: {installation('optuna')}"
        ) from None
    if launched() is not None:
        raise RunError(
            "a sweep is one process, which starts the ranks of its trials; start it without "
            "torchrun or srun, and set parallel.num_processes"
        )
    space = open_space(recipe, ranges)
    keys = [key.key for key in space.keys]
    objective = choose_objective(space.base, keys, options.pop("metric"), options.pop("direction"))
    if options["pruner"] != "none" and not objective.metric.startswith("eval_"):
        raise RunError(
            f"--pruner compares evaluations, and {objective.metric} is of training; set "
            "data.val_size and train.eval_steps, or leave it out"
        )
    options["num_trials"] = _num_trials(space, options.pop("trials"), options["sampler"])
    on, jobs, gpus, cpus = (options.pop(name) for name in ("on", "jobs", "gpus", "cpus"))
    starts, resources = _starts(on, jobs, gpus, cpus)
    output = (output or _default_output(space)).absolute()
    taken = f"{output}: another process runs this sweep; wait for it, or choose another --output"
    with lock(output, RunError, doing="sweep", taken=taken, name=LOCK):
        settings, is_resumed = SearchSettings(**options), (output / STUDY).exists()
        search = Sweep(output, space, objective, settings, starts, _tell)
        facts: dict[str, object] = {key.key: key.text for key in space.keys}
        facts["objective"] = objective
        facts["sampler"] = f"{settings.sampler}, seed {settings.seed}"
        facts["trials"] = f"{settings.num_trials}{', resumed' if is_resumed else ''}"
        if resources:
            facts["each trial"] = resources
        facts["output"] = output
        with contextlib.suppress(OSError):  # the terminal may be closed
            Console(markup=False, stderr=True, highlight=False).print(frame(recipe, facts.items()))
        results = search.run()
    if as_json:
        print_json({"output": str(output), **results.as_data()})
    else:
        _show(results, output)
    _exit(search.signals, results)


def _num_trials(space: Space, trials: int | None, sampler: str) -> int:
    if sampler != "grid":
        return trials or _TRIALS
    if space.size is None:
        endless = next(key for key in space.keys if key.values() is None)
        raise RecipeError(
            f"command line: {endless.key}={endless.text}: a grid needs values that can be counted; "
            "list them (1e-5,1e-4,1e-3), or use --sampler random"
        )
    return min(trials or space.size, space.size)


def _starts(
    on: str | None, jobs: int, gpus: int | None, cpus: int | None
) -> tuple[list[StartTrial], str]:
    """What starts each of ``jobs`` trials at once, and with what on a cluster. Raises
    ``RunError``."""
    if on is None:
        if gpus is not None or cpus is not None:
            raise RunError(
                "--gpus and --cpus are for --on ray; on this machine, GPUs and cores are divided "
                "among --jobs, and CUDA_VISIBLE_DEVICES says which GPUs there are"
            )
        # With LAUNCHER, a trial saves and ends if this process dies.
        own = {LAUNCHER: str(os.getpid())}
        shares = _environments(jobs)
        return [partial(start_training, environment={**own, **share}) for share in shares], ""
    try:
        from .on_ray import RayTrial, connect
    except ModuleNotFoundError:
        raise RunError(f"--on ray: Ray is not installed: {installation('ray')}") from None
    resources = connect(jobs, gpus, cpus)
    return [partial(RayTrial, resources, _tell)] * jobs, f"{resources}, on one node of Ray's"


def _environments(jobs: int) -> list[dict[str, str]]:
    """What each of ``jobs`` trials at once may use: its share of the GPUs and of the cores.
    Trials share a GPU if there are fewer than trials."""
    if jobs == 1:
        return [{}]
    if (visible_devices := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        devices = [device for name in visible_devices.split(",") if (device := name.strip())]
    else:
        import torch

        devices = [str(number) for number in range(torch.cuda.device_count())]
    num_cores = max(1, usable_cores() // jobs)
    num_devices = len(devices) // jobs
    environments: list[dict[str, str]] = [{} for _ in range(jobs)]
    for job, environment in enumerate(environments):
        if devices:
            job_devices = devices[job * num_devices : (job + 1) * num_devices]
            job_devices = job_devices or [devices[job % len(devices)]]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(job_devices)
        if "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(num_cores)
    return environments


def _default_output(space: Space) -> Path:
    folder = space.base.train.output_dir
    if not isinstance(folder, Path):
        raise RunError(
            f"train.output_dir: {folder} is a URL, and the trials of a sweep are in a local "
            "folder; name it with --output"
        )
    return folder.with_name(f"{folder.name}-sweep")


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed
        click.echo(visible(line), err=True)


def _show(results: Results, output: Path) -> None:
    """Print all trials from the best, and how it is trained."""
    screen = console()
    if results.trials:
        keys = list(results.trials[0].values)
        numbers = ["trial", results.metric, "step", *keys]
        trial_table = table("trial", results.metric, "step", *keys, "state", numbers=numbers)
        for trial in results.ranked:
            trial_table.add_row(
                str(trial.number),
                number(trial.value),
                "" if trial.step is None else f"{trial.step:,}",
                *(cell(f"{v:.4g}" if isinstance(v, float) else v) for v in trial.values.values()),
                cell(f"{trial.state}: {trial.reason}" if trial.reason else trial.state),
                style="bold" if trial == results.best else _STYLES.get(trial.state, ""),
            )
        screen.print(trial_table)
    if (best := results.best) is not None:
        value = f"{results.metric} {number(best.value)} at step {best.step}"
        screen.print(cell(f"best: trial {best.number}, {value}"), style="bold", soft_wrap=True)
        command = f"surefoot train {shlex.quote(str(output / 'best.yaml'))}"
        # In one line, however long, so that it can be copied.
        screen.print(cell(f"next: {command}"), soft_wrap=True)


def _exit(signals: Sequence[Signals], results: Results) -> None:
    """Exit as a run does: 128 + a signal's number; 2 if no trial has a result."""
    if signals:
        _tell(f"stopped by {signals[0].name}; run the same command to resume")
        raise SystemExit(128 + signals[0])
    if numbers := [str(trial.number) for trial in results.trials if trial.state == "half-run"]:
        half_run = f"{counted(len(numbers), 'trial is', 'trials are')} half-run"
        raise RunError(f"{half_run} ({', '.join(numbers)}); run the same command to resume")
    if results.best is None:
        first = next((trial.reason for trial in results.trials if trial.reason), "")
        raise RunError(f"no trial has a result; the first failed: {first}")
