"""The fastest settings of a recipe on this machine, each measured in a process of its own."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace

from ...errors import RunError, SurefootError
from ...recipe.recipe import Recipe, read
from ..estimate.memory_estimate import imported
from ..estimate.rank_memory import machine_for
from ..fitting import Changes, Fit, available, fits_of
from .result import BenchResult
from .search import Search, Trial
from .single_rank import SingleRankRecipe
from .subprocess_trial import TrialFailure, measured

logger = logging.getLogger(__name__)
LIMIT = 15 * 60.0  # seconds after which nothing more is tried
_SLOWEST, _PATIENCE = 4, 600.0  # times as long as the recipe itself, and seconds to compile


def find_fastest(
    one: SingleRankRecipe,
    steps: int,
    *,
    no_search: bool = False,
    on_try: Callable[[Changes], None] = lambda _: None,
    on_measured: Callable[[Trial], None] = lambda _: None,
) -> Search:
    """The recipe itself and, unless ``no_search``, the other settings that were tried; ``on_try``
    is called with each before it is measured, ``on_measured`` afterwards. Raises the error of
    ``surefoot train``, or ``RunError`` if all settings failed."""
    began = time.monotonic()
    timeout: float | None = None

    def measure(changes: Changes) -> BenchResult | TrialFailure:
        on_try(changes)
        try:
            return measured(read(one.recipe, changes), steps, timeout)
        except SurefootError as error:
            return TrialFailure(str(error), type(error).__name__)

    search = Search(
        one.recipe, measure, _fits(one.recipe), lambda: time.monotonic() - began > LIMIT
    )
    for trial in search.run():
        if isinstance(trial.outcome, TrialFailure) and not trial.changes and trial.outcome.error:
            raise trial.outcome.raised()
        on_measured(trial)
        timeout = timeout or _SLOWEST * (time.monotonic() - began) + _PATIENCE
        if no_search:
            break
    first = search.trials[0].outcome
    failed = all(isinstance(trial.outcome, TrialFailure) for trial in search.trials)
    if failed and isinstance(first, TrialFailure):
        hint = "so did all other settings"
        if no_search:
            hint = "without --no-search, smaller settings are tried"
        raise RunError(f"the recipe could not be measured: {first.reason} ({hint})")
    return search


def _fits(recipe: Recipe) -> Iterator[Fit]:
    """What fits in the memory of this machine; nothing, with a warning, where that is not known."""
    machine = replace(machine_for(recipe, None), num_processes=1)
    memory = machine.capacity if machine.on_gpu else available()
    try:
        yield from fits_of(recipe, machine, memory or 0, taken=0 if machine.on_gpu else imported())
    except SurefootError as error:
        logger.warning("no other micro-batch size is tried: %s", error)


def settings(changes: Changes) -> list[str]:
    """Changes as overrides of a command."""
    return [f"{name}={str(value).lower()}" for name, value in changes.items()]


def gain(trial: Trial, first: Trial) -> float | None:
    """The speed relative to the recipe; None if either failed."""
    new, old = trial.outcome, first.outcome
    if not isinstance(new, BenchResult) or not isinstance(old, BenchResult):
        return None
    return new.tokens_per_second / old.tokens_per_second


def as_data(found: Search, one: SingleRankRecipe, command: Sequence[str]) -> dict[str, object]:
    """All figures, in bytes, tokens and seconds."""
    first, best = found.trials[0], found.best
    return {
        "num_processes": one.num_processes,
        "measured_processes": 1,
        "examples_a_step": found.recipe.train.global_batch_size,
        **_outcome(first, first),
        "tried": [_outcome(trial, first) for trial in found.trials[1:]],
        "left_out": [dict(changes) for changes in found.left_out],
        "best": {"changes": dict(best.changes), "gain": gain(best, first)},
        "command": shlex.join(command),
    }


def _outcome(trial: Trial, first: Trial) -> dict[str, object]:
    figures = trial.outcome
    known: dict[str, object] = {"changes": dict(trial.changes)}
    if not isinstance(figures, BenchResult):
        return {**known, "failure": figures.reason}
    return {
        **known,
        "failure": None,
        "gain": gain(trial, first),
        "tokens_per_second": figures.tokens_per_second,
        "trained_tokens_per_second": figures.trained_tokens_per_second,
        "step_seconds": figures.step_seconds,
        "utilisation": figures.utilisation,
        "padding": figures.padding,
        "shares": figures.shares,
        **asdict(figures),
    }
