"""The study of a sweep, in a journal of optuna: its trials, their values, and how they ended.

A trial is in the journal, complete with its values, before its run begins, and its end is written
once. So a killed sweep neither loses nor repeats one. What a kill left half-written is removed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.pruners import MedianPruner
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from ..storage.files import sync_folder
from .files import STUDY
from .objective import Direction, ReportedValue
from .ranges import Range, SweptKey, as_text
from .space import Values

_NAME = "sweep"
_LOCK = ".lock"  # optuna's own lock file beside the journal
_WARMUP = 5  # a trial is not pruned in the first fifth of its steps
_MIN_FOR_IMPORTANCE = 4  # complete trials

optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True)
class Study:
    """The trials of a sweep. Only the process that holds the sweep's lock may have one."""

    keys: tuple[SweptKey, ...]
    direction: Direction
    storage: JournalStorage
    study_id: int

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """The ranges, in optuna's words."""
        return {key.key: distribution(key) for key in self.keys}

    def trials(self) -> list[FrozenTrial]:
        """All trials, by number."""
        return self.storage.get_all_trials(self.study_id)

    def values(self, trial: FrozenTrial) -> dict[str, object]:
        """The values of a trial's settings."""
        return from_params(self.keys, trial.params)

    def add(self, values: Values) -> int:
        """A new trial; its number. In the journal, it is one line."""
        made = create_trial(
            state=TrialState.RUNNING,
            params=to_params(self.keys, values),
            distributions=self.distributions,
        )
        return self._trial(self.storage.create_new_trial(self.study_id, made)).number

    def note(self, number: int, **facts: object) -> None:
        """Facts of a trial that runs."""
        known = self.trials()[number].user_attrs
        for name, value in facts.items():
            if known.get(name) != value:
                self.storage.set_trial_user_attr(self._id(number), name, value)

    def report(self, number: int, report: ReportedValue) -> None:
        """One more value of a trial that runs."""
        if report.step not in self.trials()[number].intermediate_values:
            value = math.nan if report.value is None else report.value
            self.storage.set_trial_intermediate_value(self._id(number), report.step, value)

    def end(self, number: int, state: TrialState, value: float | None = None) -> None:
        """A trial has ended."""
        values = None if value is None else [value]
        self.storage.set_trial_state_values(self._id(number), state, values)

    def should_prune(self, number: int, startup: int) -> bool:
        """Whether the trial's best value so far is worse than the median, at the same step, of
        the complete trials that take as many steps; there must be ``startup`` of them."""
        trials = self.trials()
        trial = trials[number]
        total = trial.user_attrs.get("total_steps")
        step = trial.last_step
        if not isinstance(total, int) or step is None or step * _WARMUP < total:
            return False
        alike = [t for t in trials if t.user_attrs.get("total_steps") == total]
        done = [t for t in alike if t.state is TrialState.COMPLETE]
        pruner = MedianPruner(n_startup_trials=startup, n_min_trials=max(1, startup))
        return pruner.prune(self.mirror([*done, trial]), trial)

    def importances(self) -> dict[str, float]:
        """The share of each setting in what tells good trials from others (PED-ANOVA); nothing if
        there are too few complete trials."""
        trials = self.trials()
        complete = [t for t in trials if t.state is TrialState.COMPLETE]
        if len(complete) < _MIN_FOR_IMPORTANCE or len({t.value for t in complete}) < 2:
            return {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # few trials, which is shown beside the shares
            found = optuna.importance.get_param_importances(
                self.mirror(complete),
                evaluator=optuna.importance.PedAnovaImportanceEvaluator(),
            )
        return {name: round(share, 4) for name, share in found.items() if math.isfinite(share)}

    def mirror(
        self, trials: Sequence[FrozenTrial], sampler: optuna.samplers.BaseSampler | None = None
    ) -> optuna.Study:
        """A study in memory with these trials."""
        made = optuna.create_study(direction=self.direction, sampler=sampler)
        made.add_trials(trials)
        return made

    def _id(self, number: int) -> int:
        return self.storage.get_trial_id_from_study_id_trial_number(self.study_id, number)

    def _trial(self, trial_id: int) -> FrozenTrial:
        return self.storage.get_trial(trial_id)


def open_study(folder: Path, keys: Sequence[SweptKey], direction: Direction) -> Study:
    """The study in ``folder``, whose lock this process holds; made if there is none."""
    path = folder / STUDY
    _repair(path)
    is_new = not path.exists()
    lock = JournalFileOpenLock(str(path))
    storage = JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
    if is_new:
        sync_folder(folder)
    known = [study._study_id for study in storage.get_all_studies() if study.study_name == _NAME]
    if known:
        return Study(tuple(keys), direction, storage, known[0])
    way = StudyDirection.MINIMIZE if direction == "minimize" else StudyDirection.MAXIMIZE
    return Study(tuple(keys), direction, storage, storage.create_new_study([way], _NAME))


def _repair(path: Path) -> None:
    """Remove what a killed process left: half a line at the end, and the lock of the file."""
    for left in path.parent.glob(f"{path.name}{_LOCK}*"):
        left.unlink(missing_ok=True)
    if not path.exists():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)


def distribution(key: SweptKey) -> BaseDistribution:
    """A range in optuna's words."""
    values = key.values
    if not isinstance(values, Range):
        return CategoricalDistribution(values.texts)
    if values.is_integer:
        step = int(values.step or 1)
        return IntDistribution(int(values.low), int(values.high), values.is_log, step)
    return FloatDistribution(values.low, values.high, values.is_log, values.step)


def to_params(keys: Sequence[SweptKey], values: Values) -> dict[str, object]:
    """Values in optuna's words: one of several choices is its text."""
    return {
        key.key: values[key.key] if isinstance(key.values, Range) else as_text(values[key.key])
        for key in keys
    }


def from_params(keys: Sequence[SweptKey], params: Mapping[str, object]) -> dict[str, object]:
    """The values of the settings."""
    found: dict[str, object] = {}
    for key in keys:
        param, values = params[key.key], key.values
        if isinstance(values, Range):
            assert isinstance(param, int | float)
            found[key.key] = values.value(param)
        else:
            found[key.key] = values.items[values.texts.index(str(param))]
    return found
