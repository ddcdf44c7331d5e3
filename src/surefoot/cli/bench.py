"""``surefoot bench``: how fast a recipe trains on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import counted
from ..terminal_text import in_bytes
from .loading import recipe_arguments, resolved_recipe
from .table import console, frame, print_json, table

if TYPE_CHECKING:
    from ..use.bench import BenchResult, SingleRankRecipe

PHASES = {
    "data": "the next window: examples read, packed or padded",
    "forward": "the model and the loss",
    "backward": "the gradient",
    "optimizer": "gradient normalization, clipping and the update of the weights",
    "rest": "everything else of the training loop",
}
_NUMBERS = ("of a step", "seconds")


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
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def bench(recipe: Path, overrides: tuple[str, ...], steps: int, as_json: bool) -> None:
    """Measure how fast RECIPE trains on this machine.

    A few optimizer steps run as `surefoot train` would run them. Nothing is saved, and
    train.output_dir is not touched. To compare settings, measure once with each as an override.

    A recipe for several ranks is measured on one rank, with that rank's batch size and without
    communication.

    OVERRIDES are dotted fields such as train.micro_batch_size=8.
    """
    loaded = resolved_recipe(recipe, overrides)
    from ..use.bench import alone, measure

    rank_recipe = alone(loaded)
    with Console(markup=False, stderr=True).status("measuring the recipe"):
        figures = measure(rank_recipe.recipe, steps)
    if as_json:
        print_json(figures.as_data(rank_recipe))
    else:
        show(figures, rank_recipe)


def show(figures: BenchResult, rank_recipe: SingleRankRecipe) -> None:
    """Print facts, and where the time goes."""
    screen = console()
    screen.print(frame(rank_recipe.recipe.model.path, _lines(figures, rank_recipe)))
    screen.print(_time_table(figures))


def _lines(figures: BenchResult, rank_recipe: SingleRankRecipe) -> Iterator[tuple[str, str]]:
    yield "device", f"{figures.device}, {figures.precision}"
    if rank_recipe.num_processes > 1:
        examples = counted(rank_recipe.recipe.train.global_batch_size, "example")
        share = f"its {examples} per step on the full model"
        rank = f"measured as one rank of {rank_recipe.num_processes:,}"
        yield "processes", f"{rank}: {share}, without communication"
    train = rank_recipe.recipe.train
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
    rich_table = table(
        "where the time goes", "of a step", "seconds", "what it is", numbers=_NUMBERS
    )
    for name, share in figures.shares.items():
        seconds = f"{figures.phases[name] / figures.steps:.3g}"
        rich_table.add_row(name, f"{100 * share:.1f} %", seconds, Text(PHASES[name], style="dim"))
    return rich_table
