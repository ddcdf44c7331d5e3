"""What a sweep has found: every trial with its values and result, the best one, and remarks."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from optuna.trial import FrozenTrial, TrialState

from .files import name_of
from .objective import Record
from .study import Study

STATES = {
    TrialState.RUNNING: "half-run",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


@dataclass(frozen=True)
class TrialResult:
    """A trial, for people and programs. ``value`` of a pruned trial is its last one."""

    number: int
    folder: str
    state: str
    values: Mapping[str, object]
    value: float | None
    step: int | None  # at which the value was reported
    total_steps: int | None
    reports: Sequence[tuple[int, float | None]]
    reason: str | None


@dataclass(frozen=True)
class Results:
    """All trials of a sweep by number, and what follows from them."""

    requested: int
    metric: str
    direction: str
    trials: tuple[TrialResult, ...]
    importance: Mapping[str, float]
    remarks: tuple[str, ...]
    exhausted: bool  # all combinations have been tried

    @property
    def best(self) -> TrialResult | None:
        """The best complete trial; the first of equal ones."""
        sign = 1 if self.direction == "minimize" else -1
        return min(self.complete, key=lambda one: sign * (one.value or 0.0), default=None)

    @property
    def complete(self) -> list[TrialResult]:
        """The complete trials, all of which have a finite value."""
        return [one for one in self.trials if one.state == "complete" and one.value is not None]

    def ranked(self) -> list[TrialResult]:
        """Complete trials from the best, then the others by number."""
        sign = 1 if self.direction == "minimize" else -1
        first = sorted(self.complete, key=lambda one: (sign * (one.value or 0.0), one.number))
        return first + [one for one in self.trials if one not in first]

    def as_data(self) -> dict[str, object]:
        """For a file."""
        best = self.best
        return {**asdict(self), "best": None if best is None else best.number}


def gather(study: Study, requested: int, metric: str, *, exhausted: bool = False) -> Results:
    """The results so far."""
    frozen = study.trials()
    trials = tuple(_result(study, trial) for trial in frozen)
    return Results(
        requested=requested,
        metric=metric,
        direction=study.direction,
        trials=trials,
        importance=study.importances(),
        remarks=tuple(_remarks(frozen, trials)),
        exhausted=exhausted,
    )


def fingerprint(records: Sequence[Record]) -> str:
    """A hash of a run's training losses."""
    losses = [(record["step"], record["loss"]) for record in records if "loss" in record]
    return hashlib.blake2b(json.dumps(losses).encode(), digest_size=8).hexdigest()


def _result(study: Study, trial: FrozenTrial) -> TrialResult:
    attrs, last = trial.user_attrs, trial.last_step
    value = trial.value
    if value is None and last is not None:
        value = trial.intermediate_values[last]
    return TrialResult(
        number=trial.number,
        folder=name_of(trial.number),
        state=STATES[trial.state],
        values=study.values(trial),
        value=_finite(value),
        step=attrs.get("step", last),
        total_steps=attrs.get("total_steps"),
        reports=[(at, _finite(one)) for at, one in sorted(trial.intermediate_values.items())],
        reason=attrs.get("reason"),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _remarks(frozen: Sequence[FrozenTrial], trials: Sequence[TrialResult]) -> Iterator[str]:
    lengths = sorted({one.total_steps for one in trials if one.total_steps is not None})
    if len(lengths) > 1:
        yield (
            f"trials differ in length, from {lengths[0]:,} to {lengths[-1]:,} steps; pruning "
            "compares only trials of equal length"
        )
    alike: dict[str, list[int]] = defaultdict(list)
    for trial in frozen:
        if trial.state is TrialState.COMPLETE and "losses" in trial.user_attrs:
            alike[trial.user_attrs["losses"]].append(trial.number)
    for numbers in alike.values():
        if len(numbers) > 1:
            yield _without_effect([trials[number] for number in numbers])


def _without_effect(trials: Sequence[TrialResult]) -> str:
    """Trials whose losses are equal to the last bit, though their settings are not."""
    first = trials[0].values
    differing = [key for key in first if any(one.values[key] != first[key] for one in trials)]
    names = ", ".join(str(one.number) for one in trials)
    return (
        f"trials {names} have bitwise equal losses, so {' and '.join(differing)} had no effect in "
        "them"
    )


def trial_folder(output: Path, number: int) -> Path:
    """The folder of a trial's run."""
    return output / name_of(number)
