"""The fastest settings of a recipe on this machine, each measured in a process of its own."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

from ...data.order.micro_batches import check_divides
from ...errors import RecipeError, RunError, SurefootError
from ...parallel.launcher import num_processes
from ...parallel.section import ParallelSection, launched
from ...recipe.batch_sizes import with_batch_sizes
from ...recipe.recipe import Recipe, read
from ..estimate.fitting import RECOMPUTE, SIZE, Changes, Fit, available, changed, fits_of, value
from ..estimate.plan import imported
from ..estimate.rank_memory import machine_for
from ._trial import TrialFailure, measured
from .measurement import BenchResult

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


PACKING, COMPILE = "data.packing", "model.compile"
MARGIN = 1.03  # times as fast; what is less may be chance

Measure = Callable[[Changes], BenchResult | TrialFailure]


@dataclass(frozen=True)
class Trial:
    """A recipe with other settings, and how it went."""

    changes: Changes  # by dotted path; none: the recipe as it is
    outcome: BenchResult | TrialFailure


@dataclass
class Search:
    """What was tried so far, of the settings that fit by estimate (``fits``). ``is_over`` says when
    to try no more."""

    recipe: Recipe
    measure: Measure
    fits: Iterable[Fit] = ()
    is_over: Callable[[], bool] = lambda: False
    trials: list[Trial] = field(default_factory=list)
    left_out: list[Changes] = field(default_factory=list)

    @property
    def best(self) -> Trial:
        """The fastest; the recipe itself if none is faster by more than chance."""
        found = self.trials[0]
        for trial in self.trials[1:]:
            if is_better(trial, found):
                found = trial
        return found

    def run(self) -> Iterator[Trial]:
        """The recipe as it is, then everything else; each as soon as it is known."""
        yield self._try({})
        most = 0
        for fit in self.fits:
            if self.is_over():
                break
            if fit.micro_batch_size > most:  # else recomputation makes room for nothing
                most = fit.micro_batch_size
                yield from self._sizes(fit)
        for name in (PACKING, COMPILE):
            now = value(changed(self.recipe, self.best.changes), name)
            yield from self._add({**self.best.changes, name: not now})
        self._confirm()

    def _confirm(self) -> None:
        """Measure the recipe again before something else is called faster: other work, or heat, may
        have slowed it down the first time."""
        first = self.trials[0].outcome
        if isinstance(first, TrialFailure) or not self.best.changes or self.is_over():
            return
        again = self.measure({})
        if isinstance(again, BenchResult) and again.tokens_per_second > first.tokens_per_second:
            self.trials[0] = Trial({}, again)

    def _sizes(self, fit: Fit) -> Iterator[Trial]:
        """The largest micro-batch that fits, then smaller ones, as long as each is faster than the
        one before."""
        before: Trial | None = None
        for size in _halved(fit):
            changes = self._different({RECOMPUTE: fit.policy, SIZE: size})
            yield from self._add(changes)
            trial = next((one for one in self.trials if one.changes == changes), None)
            if trial is None or (before is not None and not is_better(trial, before)):
                return
            before = None if isinstance(trial.outcome, TrialFailure) else trial

    def _different(self, changes: Changes) -> Changes:
        """Without what the recipe has."""
        return {k: v for k, v in changes.items() if v != value(self.recipe, k)}

    def _add(self, changes: Changes) -> Iterator[Trial]:
        """One more trial, unless it is the recipe itself, or was made."""
        changes = self._different(changes)
        if any(trial.changes == changes for trial in self.trials):
            return
        if self.is_over():
            self.left_out.append(changes)
            return
        yield self._try(changes)

    def _try(self, changes: Changes) -> Trial:
        trial = Trial(changes, self.measure(changes))
        self.trials.append(trial)
        return trial


def _halved(fit: Fit) -> Iterator[int]:
    """The largest micro-batch, and each time the largest that is at most half as large."""
    size = fit.micro_batch_size
    while size:
        yield size
        size = max((each for each in fit.sizes if 2 * each <= size), default=0)


def is_better(new: Trial, old: Trial) -> bool:
    """Whether the run would be over sooner, by more than chance; compiling counts."""
    if isinstance(new.outcome, TrialFailure):
        return False
    if isinstance(old.outcome, TrialFailure):
        return True
    tokens = old.outcome.run_steps * old.outcome.tokens / old.outcome.steps
    return _run_seconds(old.outcome, tokens) > MARGIN * _run_seconds(new.outcome, tokens)


def _run_seconds(figures: BenchResult, tokens: float) -> float:
    return figures.compiling_seconds + tokens / figures.tokens_per_second


@dataclass(frozen=True)
class SingleRankRecipe:
    """A recipe for one rank, and the number of ranks for which it stands."""

    recipe: Recipe
    num_processes: int


def alone(recipe: Recipe) -> SingleRankRecipe:
    """The share of one rank.

    Raises ``RecipeError`` if the ranks do not form the mesh, ``DataError`` if they do not divide
    the batch, ``RunError`` if a launcher has started several.
    """
    if (found := launched()) is not None and found[1] > 1:
        raise RunError(
            f"surefoot bench measures one rank, but {found[1]} were started; start it without "
            "torchrun or srun"
        )
    count = 1 if found is not None else num_processes(recipe.parallel)
    try:
        ranks = recipe.parallel.num_data_ranks(count)
    except ValueError as error:
        raise RecipeError(f"parallel: {error}") from None
    recipe, note = with_batch_sizes(recipe, ranks)
    if note is not None:
        logger.info("%s", note)
    train = recipe.train
    check_divides(train.global_batch_size, train.fixed_micro_batch_size, ranks)
    one = replace(train, global_batch_size=train.global_batch_size // ranks)
    return SingleRankRecipe(replace(recipe, train=one, parallel=ParallelSection()), count)
