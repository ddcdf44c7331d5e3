"""Which settings to try: the sizes that fit, then switches on top of the best so far.

They change nothing of what is trained but float rounding, so the fastest may be taken. Every
suggestion has been measured as a whole; no gains are multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ...recipe.recipe import Recipe
from ..fitting import RECOMPUTE, SIZE, Changes, Fit, changed, value
from .result import BenchResult
from .subprocess_trial import TrialFailure

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
