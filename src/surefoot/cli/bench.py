"""``surefoot bench``: how fast a recipe trains on this machine, and which settings are faster."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import counted
from ..terminal_text import one_line
from .loading import recipe_arguments, resolved_recipe
from .table import cell, console, frame, in_bytes, print_json, table

if TYPE_CHECKING:
    from ..use.bench.measurement import BenchResult
    from ..use.bench.search import Search, SingleRankRecipe, Trial
    from ..use.estimate.fitting import Changes

PHASES = {
    "data": "the next window: examples read, packed or padded",
    "forward": "the model and the loss",
    "backward": "the gradient",
    "optimizer": "gradient normalization, clipping and the update of the weights",
    "rest": "everything else of the training loop",
}
_NUMBERS = ("of a step", "seconds", "tokens/s", "gain", "memory")


@click.command()
@recipe_arguments
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    metavar="N",
    help="Optimizer steps to time, after two warm-up steps; fewer if they take over 30 s together.",
)
@click.option(
    "--no-search", is_flag=True, help="Measure the recipe itself, and try no other settings."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def bench(
    recipe: Path, overrides: tuple[str, ...], steps: int, no_search: bool, as_json: bool
) -> None:
    """Measure how fast RECIPE trains on this machine, and which settings make it faster.

    A few optimizer steps run as `surefoot train` would run them, in a process of their own. Nothing
    is saved, and train.output_dir is not touched. Then other settings are tried, each in a new
    process: train.micro_batch_size, data.packing, model.gradient_checkpointing and model.compile. A
    setting that fails, for example out of memory, is listed with its error. After 15 minutes no
    further settings are tried.

    A recipe for several ranks is measured on one rank, with that rank's batch size and without
    communication.

    OVERRIDES are dotted fields such as train.micro_batch_size=8.
    """
    loaded = resolved_recipe(recipe, overrides)
    from ..use.bench.search import alone, as_data, find_fastest, settings

    one = alone(loaded)
    with Console(stderr=True).status("measuring the recipe") as status:

        def tell(changes: Changes) -> None:
            given = " ".join(settings(changes))
            status.update(f"trying {given}" if given else "measuring the recipe")

        def report(trial: Trial) -> None:
            given = " ".join(settings(trial.changes)) or "the recipe as it is"
            status.console.print(one_line(f"{given}: {_in_short(trial)}"), markup=False)

        if not status.console.is_terminal:  # where no status is shown
            status.console.print("measuring the recipe")
        found = find_fastest(one, steps, no_search=no_search, on_try=tell, on_measured=report)
    command = ["surefoot", "train", str(recipe), *overrides, *settings(found.best.changes)]
    if as_json:
        print_json(as_data(found, one, command))
        return
    show(found, one, command)


def _in_short(trial: Trial) -> str:
    from ..use.bench.measurement import BenchResult

    figures = trial.outcome
    if not isinstance(figures, BenchResult):
        return f"failed: {next(iter(figures.reason.splitlines()), '')}"
    memory = in_bytes(figures.peak_memory)
    return f"{figures.tokens_per_second:,.0f} tokens/s, {memory} at its peak"


def show(found: Search, one: SingleRankRecipe, command: list[str]) -> None:
    """Print facts, where the time goes, what was tried, and the fastest command."""
    from ..use.bench.measurement import BenchResult

    screen, first = console(), found.trials[0].outcome
    if isinstance(first, BenchResult):
        screen.print(frame(found.recipe.model.path, _lines(found, first, one)))
        screen.print(_time_table(first))
    if len(found.trials) > 1:
        screen.print()
        screen.print(_trials_table(found))
        screen.print()
        for line in _verdict(found, command):
            screen.print(line, soft_wrap=True)


def _lines(found: Search, figures: BenchResult, one: SingleRankRecipe) -> Iterator[tuple[str, str]]:
    yield "device", f"{figures.device}, {figures.precision}"
    if one.num_processes > 1:
        examples = counted(one.recipe.train.global_batch_size, "example")
        share = f"its {examples} per step on the full model"
        rank = f"measured as one rank of {one.num_processes:,}"
        yield "processes", f"{rank}: {share}, without communication"
    train = found.recipe.train
    examples = counted(train.fixed_micro_batch_size, "example")
    passes = f"{train.gradient_accumulation_steps:,} × {examples}"
    yield "step", f"{figures.step_seconds:.3g} s for {passes} (mean of {figures.steps:,})"
    speed = f"{figures.tokens_per_second:,.0f} tokens/s"
    yield "speed", f"{speed}, {figures.trained_tokens_per_second:,.0f} of them trained"
    yield "padding", f"{100 * figures.padding:.3g} % of the positions"
    flops = f"{figures.flops / figures.seconds / 1e9:,.4g} GFLOP/s of the model"
    peak = f"{figures.gemm_flops / 1e9:,.4g} that a product of matrices reaches on this device"
    yield "arithmetic", f"{flops}, {100 * figures.utilisation:.3g} % of the {peak}"
    yield "memory", f"{in_bytes(figures.peak_memory)} at its peak, in the largest step"
    yield from figures.used.items()
    if figures.compiling_seconds:
        yield "compiling", f"{figures.compiling_seconds:.3g} s in the first step"


def _time_table(figures: BenchResult) -> Table:
    made = table("where the time goes", "of a step", "seconds", "what it is", numbers=_NUMBERS)
    for name, share in figures.shares.items():
        seconds = f"{figures.phases[name] / figures.steps:.3g}"
        made.add_row(name, f"{100 * share:.1f} %", seconds, Text(PHASES[name], style="dim"))
    return made


def _trials_table(found: Search) -> Table:
    from ..use.bench.search import LIMIT, settings

    made = table("settings", "tokens/s", "gain", "memory", "besides", numbers=_NUMBERS)
    for trial in found.trials:
        name = " ".join(settings(trial.changes)) or "as it is"
        style = "bold" if trial is found.best else ""
        made.add_row(cell(name), *_results(trial, found.trials[0]), style=style)
    for changes in found.left_out:
        note = Text(f"not tried: the limit of {LIMIT / 60:.0f} minutes is reached", style="dim")
        made.add_row(cell(" ".join(settings(changes))), "", "", "", note)
    return made


def _results(trial: Trial, first: Trial) -> list[str | Text]:
    from ..use.bench.measurement import BenchResult
    from ..use.bench.search import gain

    figures = trial.outcome
    if not isinstance(figures, BenchResult):
        first_line = next(iter(figures.reason.splitlines()), "")
        return ["", "", "", Text.assemble(("failed: ", "red"), cell(first_line))]
    times = gain(trial, first)
    compiling = figures.compiling_seconds
    return [
        f"{figures.tokens_per_second:,.0f}",
        "" if times is None else f"× {times:.2f}",
        in_bytes(figures.peak_memory),
        Text(f"{compiling:.0f} s to compile" if compiling else "", style="dim"),
    ]


def _verdict(found: Search, command: list[str]) -> Iterator[Text]:
    from ..use.bench.search import gain

    best, first = found.best, found.trials[0]
    if not best.changes:
        yield Text("no setting is faster than the recipe beyond chance")
        return
    times = gain(best, first)
    how = "works" if times is None else f"is {times:.2f} times as fast"
    yield Text(f"this {how}, with the same result except for rounding:")
    yield Text.assemble("  ", (shlex.join(command), "bold"))
