"""Which settings to try: one after the other, each on top of the best so far.

They change nothing of what is trained but float rounding, so the fastest may be taken. Every
suggestion has been measured as a whole; no gains are multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ...recipe.recipe import Recipe
from ..other_settings import (
    COMPILE,
    PACKING,
    RECOMPUTE,
    SIZE,
    Changes,
    changed,
    resized,
    toggled,
    value,
)
from .result import BenchResult
from .subprocess_trial import TrialFailure

MARGIN = 1.03  # times as fast; what is less may be chance

Measure = Callable[[Changes], BenchResult | TrialFailure]


@dataclass(frozen=True)
class Trial:
    """A recipe with other settings, and how it went."""

    changes: Changes  # by dotted path; none: the recipe as it is
    outcome: BenchResult | TrialFailure


@dataclass
class Search:
    """What was tried so far. ``is_over`` says when to try no more."""

    recipe: Recipe
    measure: Measure
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
        first = self._try({})
        yield first
        if isinstance(first.outcome, BenchResult):
            yield from self._sizes(2, 1)
        if self._now(SIZE) == self.recipe.train.micro_batch_size:
            yield from self._sizes(1, 2)
        yield from self._toggled(PACKING)
        if PACKING in self.best.changes:
            yield from self._sizes(2, 1)
        yield from self._toggled(RECOMPUTE)
        if self._has_room():
            yield from self._sizes(2, 1, {RECOMPUTE: "full"})
        yield from self._toggled(COMPILE)
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

    def _sizes(self, times: int, part: int, also: Changes | None = None) -> Iterator[Trial]:
        """Larger or smaller passes, as long as each is faster than the one before."""
        while True:
            best = self.best
            new = resized(changed(self.recipe, best.changes), times, part)
            if not new:
                return
            yield from self._add({**best.changes, **(also or {}), **new})
            if self.best is best:
                return

    def _toggled(self, name: str) -> Iterator[Trial]:
        now = changed(self.recipe, self.best.changes)
        yield from self._add({**self.best.changes, name: toggled(now, name)})

    def _has_room(self) -> bool:
        """Whether recomputation works where larger passes did not."""
        failed = any(isinstance(t.outcome, TrialFailure) and SIZE in t.changes for t in self.trials)
        last = self.trials[-1]
        works = last.changes.get(RECOMPUTE) == "full" and isinstance(last.outcome, BenchResult)
        return failed and works

    def _add(self, changes: Changes) -> Iterator[Trial]:
        """One more trial, unless it is the recipe itself, or was made."""
        changes = {k: v for k, v in changes.items() if v != value(self.recipe, k)}
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

    def _now(self, name: str) -> int:
        return int(self.best.changes.get(name, value(self.recipe, name)))


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
