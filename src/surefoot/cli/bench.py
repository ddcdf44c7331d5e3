"""``surefoot bench``: how fast a recipe trains on this machine, and which settings are faster."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .table import cell, console, frame, in_bytes, print_json, table

if TYPE_CHECKING:
    from ..forecast.bench.result import BenchResult
    from ..forecast.bench.search import Changes, Search, Trial
    from ..forecast.bench.single_rank import SingleRankRecipe
    from ..forecast.bench.subprocess_trial import Failure

PHASES = {
    "data": "the next window: examples read, packed or padded",
    "forward": "the model and the loss",
    "backward": "the gradient",
    "optimizer": "gradient normalization, clipping and the update of the weights",
    "rest": "everything else of the training loop",
}
LIMIT = 15 * 60.0  # seconds after which nothing more is tried
_NUMBERS = ("of a step", "seconds", "tokens/s", "gain", "memory")
_SLOWEST, _PATIENCE = 4, 600.0  # times as long as the recipe itself, and seconds to compile


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    metavar="N",
    help="Optimizer steps to time, after two warm-up steps; fewer if they take over 30 s together.",
)
@click.option(
    "--only-this", is_flag=True, help="Measure the recipe itself, and try no other settings."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def bench(
    recipe: Path, overrides: tuple[str, ...], steps: int, only_this: bool, as_json: bool
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
    from ..recipe.recipe import load

    loaded = load(recipe, overrides)
    from ..forecast.bench.single_rank import alone

    one = alone(loaded)
    found = measured(one, steps, only_this=only_this)
    command = ["surefoot", "train", str(recipe), *overrides, *_settings(found.best.changes)]
    if as_json:
        print_json(as_data(found, one, command))
        return
    show(found, one, command)


def measured(one: SingleRankRecipe, steps: int, *, only_this: bool) -> Search:
    """The recipe itself and, unless ``only_this``, the other settings that were tried.

    Raises:
        SurefootError: the recipe cannot be trained, with the error of ``surefoot train``, or all
            settings failed.
    """
    from ..errors import RunError, SurefootError
    from ..forecast.bench.search import Search
    from ..forecast.bench.subprocess_trial import Failure, measured
    from ..recipe.recipe import read

    began = time.monotonic()
    timeout: float | None = None
    screen = Console(stderr=True)
    with screen.status("measuring the recipe") as status:

        def measure(changes: Changes) -> BenchResult | Failure:
            status.update(
                f"trying {' '.join(_settings(changes))}" if changes else "measuring the recipe"
            )
            try:
                return measured(read(one.recipe, changes), steps, timeout)
            except SurefootError as error:
                return Failure(str(error), type(error).__name__)

        search = Search(one.recipe, measure, lambda: time.monotonic() - began > LIMIT)
        for trial in search.run():
            if isinstance(trial.outcome, Failure) and not trial.changes and trial.outcome.error:
                raise trial.outcome.raised()
            timeout = timeout or _SLOWEST * (time.monotonic() - began) + _PATIENCE
            if only_this:
                break
    first = search.trials[0].outcome
    if all(isinstance(trial.outcome, Failure) for trial in search.trials):
        assert isinstance(first, Failure)
        hint = (
            "without --only-this, smaller settings are tried"
            if only_this
            else ("so did all other settings")
        )
        raise RunError(f"the recipe could not be measured: {first.reason} ({hint})")
    return search


def _settings(changes: Changes) -> list[str]:
    return [f"{name}={str(value).lower()}" for name, value in changes.items()]


def _gain(trial: Trial, first: Trial) -> float | None:
    """The speed relative to the recipe; None if either failed."""
    from ..forecast.bench.result import BenchResult

    new, old = trial.outcome, first.outcome
    if not isinstance(new, BenchResult) or not isinstance(old, BenchResult):
        return None
    return new.tokens_per_second / old.tokens_per_second


def show(found: Search, one: SingleRankRecipe, command: list[str]) -> None:
    """Print facts, where the time goes, what was tried, and the fastest command."""
    from ..forecast.bench.result import BenchResult

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
        yield "processes", f"measured as one rank of {one.num_processes:,}: {_apart(one)}"
    train = found.recipe.train
    passes = f"{train.gradient_accumulation_steps:,} × {train.micro_batch_size:,} examples"
    yield "step", f"{figures.step_seconds:.3g} s for {passes} (mean of {figures.steps:,})"
    speed = f"{figures.tokens_per_second:,.0f} tokens/s"
    yield "speed", f"{speed}, {figures.trained_tokens_per_second:,.0f} of them trained"
    yield "padding", f"{100 * figures.padding:.3g} % of the positions"
    flops = f"{figures.flops / figures.seconds / 1e9:,.4g} GFLOP/s of the model"
    peak = f"{figures.gemm_flops / 1e9:,.4g} that a product of matrices reaches on this device"
    yield "arithmetic", f"{flops}, {100 * figures.utilisation:.3g} % of the {peak}"
    yield "memory", f"{in_bytes(figures.peak_memory)} at its peak, in the largest step"
    if figures.compiling_seconds:
        yield "compiling", f"{figures.compiling_seconds:.3g} s in the first step"


def _apart(one: SingleRankRecipe) -> str:
    share = f"its {one.recipe.train.global_batch_size:,} examples per step"
    return f"{share} on the full model, without communication"


def _time_table(figures: BenchResult) -> Table:
    made = table("where the time goes", "of a step", "seconds", "what it is", numbers=_NUMBERS)
    for name, share in figures.shares.items():
        seconds = f"{figures.phases[name] / figures.steps:.3g}"
        made.add_row(name, f"{100 * share:.1f} %", seconds, Text(PHASES[name], style="dim"))
    return made


def _trials_table(found: Search) -> Table:
    made = table("settings", "tokens/s", "gain", "memory", "besides", numbers=_NUMBERS)
    for trial in found.trials:
        name = " ".join(_settings(trial.changes)) or "as it is"
        style = "bold" if trial is found.best else ""
        made.add_row(cell(name), *_results(trial, found.trials[0]), style=style)
    for changes in found.left_out:
        note = Text(f"not tried: the limit of {LIMIT / 60:.0f} minutes is reached", style="dim")
        made.add_row(cell(" ".join(_settings(changes))), "", "", "", note)
    return made


def _results(trial: Trial, first: Trial) -> list[str | Text]:
    from ..forecast.bench.result import BenchResult

    figures = trial.outcome
    if not isinstance(figures, BenchResult):
        return ["", "", "", Text.assemble(("failed: ", "red"), cell(_first_line(figures)))]
    gain = _gain(trial, first)
    compiling = figures.compiling_seconds
    return [
        f"{figures.tokens_per_second:,.0f}",
        "" if gain is None else f"× {gain:.2f}",
        in_bytes(figures.peak_memory),
        Text(f"{compiling:.0f} s to compile" if compiling else "", style="dim"),
    ]


def _first_line(failure: Failure) -> str:
    return next(iter(failure.reason.splitlines()), "")


def _verdict(found: Search, command: list[str]) -> Iterator[Text]:
    best, first = found.best, found.trials[0]
    if not best.changes:
        yield Text("no setting is faster than the recipe beyond chance")
        return
    gain = _gain(best, first)
    how = "works" if gain is None else f"is {gain:.2f} times as fast"
    yield Text(f"this {how}, with the same result except for rounding:")
    yield Text.assemble("  ", (shlex.join(command), "bold"))


def as_data(found: Search, one: SingleRankRecipe, command: list[str]) -> dict[str, object]:
    """All figures, in bytes, tokens and seconds."""
    first, best = found.trials[0], found.best
    return {
        "num_processes": one.num_processes,
        "measured_processes": 1,
        "examples_a_step": found.recipe.train.global_batch_size,
        **_outcome(first, first),
        "tried": [_outcome(trial, first) for trial in found.trials[1:]],
        "left_out": [dict(changes) for changes in found.left_out],
        "best": {"changes": dict(best.changes), "gain": _gain(best, first)},
        "command": shlex.join(command),
    }


def _outcome(trial: Trial, first: Trial) -> dict[str, object]:
    from ..forecast.bench.result import BenchResult

    figures = trial.outcome
    known: dict[str, object] = {"changes": dict(trial.changes)}
    if not isinstance(figures, BenchResult):
        return {**known, "failure": figures.reason}
    return {
        **known,
        "failure": None,
        "gain": _gain(trial, first),
        "tokens_per_second": figures.tokens_per_second,
        "trained_tokens_per_second": figures.trained_tokens_per_second,
        "step_seconds": figures.step_seconds,
        "utilisation": figures.utilisation,
        "padding": figures.padding,
        "shares": figures.shares,
        **asdict(figures),
    }
