"""The study of a sweep, in a journal of optuna: its trials, their values, how they ended, and what
follows from them.

A trial is in the journal, complete with its values, before its run begins, and its end is written
once. So a killed sweep neither loses nor repeats one.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import optuna
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.pruners import MedianPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState, create_trial

from .objective import Direction
from .space import Space, Values, as_text

STUDY = "study.journal"
SAMPLERS = ("tpe", "random", "grid")
_ATTEMPTS = 20  # draws before a combination that is new is taken in order
_MAX_SIZE = 100_000  # combinations that are looked through for one that is new
_WARMUP = 5  # a trial is not pruned in the first fifth of its steps
_MIN_FOR_IMPORTANCE = 4  # complete trials
_STATES = {
    TrialState.RUNNING: "half-run",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}

optuna.logging.set_verbosity(optuna.logging.WARNING)


def open_study(folder: Path, direction: Direction) -> optuna.Study:
    """The study in ``folder``, whose lock this process holds; made if there is none."""
    path = folder / STUDY
    # What a kill leaves is not for optuna 5: it waits half a minute for its own lock, and a torn
    # last line makes the journal unreadable with the next one.
    for left in folder.glob(f"{STUDY}.lock*"):
        left.unlink(missing_ok=True)
    if path.exists() and not (data := path.read_bytes()).endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)
    backend = JournalFileBackend(str(path), lock_obj=JournalFileOpenLock(str(path)))
    return optuna.create_study(
        storage=JournalStorage(backend),
        study_name="sweep",
        direction=direction,
        load_if_exists=True,
    )


def values_of(space: Space, trial: FrozenTrial) -> dict[str, object]:
    """The values of a trial's settings."""
    return {key.key: key.value(trial.params[key.key]) for key in space.keys}


def add(study: optuna.Study, space: Space, values: Values) -> int:
    """A new trial; its number. In the journal, it is one line."""
    made = create_trial(
        state=TrialState.RUNNING,
        params={key.key: key.param(values[key.key]) for key in space.keys},
        distributions={key.key: key.distribution for key in space.keys},
    )
    study.add_trial(made)
    return study.get_trials(deepcopy=False)[-1].number


def running(study: optuna.Study, number: int) -> optuna.Trial:
    """A trial that has not ended, to which reports and facts are added."""
    return optuna.Trial(study, study.get_trials(deepcopy=False)[number]._trial_id)


def next_values(space: Space, study: optuna.Study, sampler: str, seed: int) -> Values | None:
    """The values of the next trial: a function of the seed, its number, and the trials before it,
    so that a sweep that was killed continues as it would have. None if all combinations have been
    tried."""
    trials = study.get_trials(deepcopy=False)
    if sampler == "grid":
        return next(itertools.islice(space.combinations(), len(trials), None), None)
    known = {as_text(values_of(space, trial)) for trial in trials}
    distributions = {key.key: key.distribution for key in space.keys}
    for attempt in range(_ATTEMPTS):
        # One that began with the same seed after a restart would draw the first trials again.
        text = f"{seed}/{len(trials)}/{attempt}".encode()
        own = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big")
        made = TPESampler(seed=own) if sampler == "tpe" else RandomSampler(seed=own)
        drawn = _mirror(study, trials, made).ask(distributions).params
        found = {key.key: key.value(drawn[key.key]) for key in space.keys}
        if as_text(found) not in known:
            return found
    if space.size is None or space.size > _MAX_SIZE:
        return found
    return next((one for one in space.combinations() if as_text(one) not in known), None)


def should_prune(study: optuna.Study, number: int, startup: int) -> bool:
    """Whether the trial's best value so far is worse than the median, at the same step, of the
    complete trials that take as many steps; there must be ``startup`` of them."""
    trials = study.get_trials(deepcopy=False)
    trial, total = trials[number], trials[number].user_attrs["total_steps"]
    if trial.last_step is None or trial.last_step * _WARMUP < total:
        return False
    complete = [one for one in trials if one.state is TrialState.COMPLETE]
    alike = [one for one in complete if one.user_attrs["total_steps"] == total]
    pruner = MedianPruner(n_startup_trials=startup, n_min_trials=startup)
    return pruner.prune(_mirror(study, [*alike, trial]), trial)


def _mirror(
    study: optuna.Study, trials: Sequence[FrozenTrial], sampler: BaseSampler | None = None
) -> optuna.Study:
    """A study in memory with these trials."""
    made = optuna.create_study(direction=study.direction, sampler=sampler)
    made.add_trials(trials)
    return made


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
    def complete(self) -> list[TrialResult]:
        """The complete trials from the best; of equal ones, the first one precedes."""
        sign = 1 if self.direction == "minimize" else -1
        found = [one for one in self.trials if one.state == "complete"]
        return sorted(found, key=lambda one: sign * (one.value or 0.0))

    @property
    def best(self) -> TrialResult | None:
        """The best complete trial."""
        return next(iter(self.complete), None)

    def as_data(self) -> dict[str, object]:
        """For a file."""
        return {**asdict(self), "best": self.best.number if self.best else None}


def gather(
    study: optuna.Study, space: Space, requested: int, metric: str, *, exhausted: bool = False
) -> Results:
    """The results so far."""
    frozen = study.get_trials(deepcopy=False)
    trials = tuple(_result(space, trial) for trial in frozen)
    return Results(
        requested=requested,
        metric=metric,
        direction=study.direction.name.lower(),
        trials=trials,
        importance=importances(study),
        remarks=tuple(_remarks(frozen, trials)),
        exhausted=exhausted,
    )


def importances(study: optuna.Study) -> dict[str, float]:
    """The share of each setting in what tells good trials from others (PED-ANOVA); nothing if
    there are too few complete trials."""
    complete = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    if len(complete) < _MIN_FOR_IMPORTANCE or len({trial.value for trial in complete}) < 2:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few trials, which is shown beside the shares
        found = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    return {name: round(share, 4) for name, share in found.items() if math.isfinite(share)}


def folder_name(number: int) -> str:
    """The folder of a trial's run, in that of the sweep."""
    return f"trial-{number:04d}"


def _result(space: Space, trial: FrozenTrial) -> TrialResult:
    attrs, last = trial.user_attrs, trial.last_step
    value = trial.value
    if value is None and last is not None:
        value = trial.intermediate_values[last]
    return TrialResult(
        number=trial.number,
        folder=folder_name(trial.number),
        state=_STATES[trial.state],
        values=values_of(space, trial),
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
    alike = defaultdict[str, list[TrialResult]](list)
    for trial in frozen:
        if trial.state is TrialState.COMPLETE:
            alike[trial.user_attrs["losses"]].append(trials[trial.number])
    for equal in alike.values():
        first = equal[0].values
        varied = [key for key in first if any(one.values[key] != first[key] for one in equal)]
        if varied:
            yield (
                f"trials {', '.join(str(one.number) for one in equal)} have bitwise equal losses, "
                f"so {' and '.join(varied)} had no effect in them"
            )
