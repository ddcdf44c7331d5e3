"""The study of a sweep, in a journal of optuna: what is searched, its trials, their values, and
how they ended.

A trial is in the journal, complete with its values, before its run begins, and its end is written
once. So a killed sweep neither loses nor repeats one.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import optuna
from optuna.pruners import MedianPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState, create_trial

from ...errors import RunError, first_line
from ...storage.files import raising, read_file
from .objective import Direction
from .space import Space, Values, as_text

STUDY = "study.journal"
_DRAWS = 100  # that may give a combination again before all are taken for tried
_WARMUP = 5  # a trial is not pruned in the first fifth of its steps
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
    # last line makes the journal unreadable with the next one (decisions/0076).
    for stale_lock in folder.glob(f"{STUDY}.lock*"):
        stale_lock.unlink(missing_ok=True)
    if path.exists():
        with raising(RunError, "the study"):
            data = read_file(path)
        if not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)
    backend = JournalFileBackend(str(path), lock_obj=JournalFileOpenLock(str(path)))
    try:
        storage = JournalStorage(backend)
        names = optuna.get_all_study_names(storage)
    except Exception as error:  # what a damaged file makes the reader raise may be anything
        raise RunError(
            f"{path}: not a study that optuna can read ({type(error).__name__}: "
            f"{first_line(error)}); restore it, or choose another --output"
        ) from error
    if "sweep" in names:  # create_study(load_if_exists=True) would write a line in any case
        return optuna.load_study(study_name="sweep", storage=storage)
    return optuna.create_study(study_name="sweep", storage=storage, direction=direction)


def values_of(space: Space, trial: FrozenTrial) -> dict[str, object]:
    """The values of a trial's settings."""
    return {key.key: key.value(trial.params[key.key]) for key in space.keys}


def add(study: optuna.Study, space: Space, values: Values) -> int:
    """A new trial; its number. In the journal, it is one line."""
    trial = create_trial(
        state=TrialState.RUNNING,
        params={key.key: key.param(values[key.key]) for key in space.keys},
        distributions={key.key: key.distribution for key in space.keys},
    )
    # Not Study.ask, which writes a line for the trial and one for each value: a kill between them
    # leaves a trial without values (decisions/0076).
    study.add_trial(trial)
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
    # One that began with the same seed after a restart would draw the first trials again.
    text = f"{seed}/{len(trials)}".encode()
    trial_seed = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big")
    sampler_class = TPESampler if sampler == "tpe" else RandomSampler
    copy = _in_memory(study, trials, sampler_class(seed=trial_seed))
    distributions = {key.key: key.distribution for key in space.keys}
    # optuna draws a combination again that was tried (decisions/0076).
    tried = {as_text(values_of(space, trial)) for trial in trials}
    for _ in range(_DRAWS):
        drawn = copy.ask(distributions).params
        values = {key.key: key.value(drawn[key.key]) for key in space.keys}
        if as_text(values) not in tried:
            return values
    return None


def should_prune(study: optuna.Study, number: int, startup: int) -> bool:
    """Whether the trial's best value so far is worse than the median, at the same step, of the
    complete trials that take as many steps; there must be ``startup`` of them."""
    trials = study.get_trials(deepcopy=False)
    trial, total = trials[number], trials[number].user_attrs.get("total_steps")
    if total is None or trial.last_step is None or trial.last_step * _WARMUP < total:
        return False
    complete = [other for other in trials if other.state is TrialState.COMPLETE]
    alike = [other for other in complete if other.user_attrs.get("total_steps") == total]
    # optuna's pruner compares trials of any length, so it gets those of this one (decisions/0076).
    pruner = MedianPruner(n_startup_trials=startup, n_min_trials=startup)
    return pruner.prune(_in_memory(study, [*alike, trial]), trial)


def _in_memory(
    study: optuna.Study, trials: Sequence[FrozenTrial], sampler: BaseSampler | None = None
) -> optuna.Study:
    """A study in memory with these trials."""
    copy = optuna.create_study(direction=study.direction, sampler=sampler)
    copy.add_trials(trials)
    return copy


@dataclass(frozen=True)
class TrialResult:
    """A trial, for people and programs. ``value`` of a pruned trial is its last one."""

    number: int
    folder: str
    state: str
    values: Mapping[str, object]
    value: float | None
    step: int | None  # at which the value was reported
    reason: str | None


@dataclass(frozen=True)
class Results:
    """All trials of a sweep by number."""

    metric: str
    direction: str
    trials: Sequence[TrialResult]

    @property
    def ranked(self) -> list[TrialResult]:
        """The complete trials from the best, of equal ones the first one before, then the others
        by number."""
        sign = 1 if self.direction == "minimize" else -1
        complete = [trial for trial in self.trials if trial.state == "complete"]
        others = [trial for trial in self.trials if trial.state != "complete"]
        return [*sorted(complete, key=lambda trial: sign * (trial.value or 0.0)), *others]

    @property
    def best(self) -> TrialResult | None:
        """The best complete trial."""
        return next((trial for trial in self.ranked if trial.state == "complete"), None)

    def as_data(self) -> dict[str, object]:
        """For a file."""
        return {**asdict(self), "best": self.best.number if self.best else None}


def gather(study: optuna.Study, space: Space, metric: str) -> Results:
    """The results so far."""
    trials = []
    for trial in study.get_trials(deepcopy=False):
        value, attrs = trial.value, trial.user_attrs
        if value is None and trial.last_step is not None:
            value = trial.intermediate_values[trial.last_step]
        result = TrialResult(
            number=trial.number,
            folder=folder_name(trial.number),
            state=_STATES[trial.state],
            values=values_of(space, trial),
            value=value if value is not None and math.isfinite(value) else None,
            step=attrs.get("step", trial.last_step),
            reason=attrs.get("reason"),
        )
        trials.append(result)
    return Results(metric, study.direction.name.lower(), trials)


def folder_name(number: int) -> str:
    """The folder of a trial's run, in that of the sweep."""
    return f"trial-{number:04d}"
