"""A sweep from its first trial to its last: starts trials, follows them, ends bad ones early."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from optuna.trial import TrialState

from ..errors import SKIPPED_STEPS, STOP_SIGNALS, RecipeError, RunError
from . import files, trial_process
from .objective import Objective, ReportedValue
from .results import Results, fingerprint, gather, trial_folder
from .sampling import next_values
from .space import Space, Values, text_of
from .study import Study
from .trial_process import RunFiles, TrialProcess

PAUSE = 0.2  # seconds between two looks at the trials
Tell = Callable[[str], None]


@dataclass(frozen=True)
class SearchSettings:
    """How the values of trials are chosen, and which trials end early."""

    sampler: str
    seed: int
    pruner: str
    prune_after: int


@dataclass
class ActiveTrial:
    """A trial that has a slot: it runs, or waits for the process of an earlier launch to end."""

    number: int
    folder: Path
    slot: int
    run: RunFiles
    process: TrialProcess | None = None
    total_steps: int | None = None
    is_pruned: bool = False
    is_waiting: bool = False
    num_reports: int = 0  # that are in the study


@dataclass
class Sweep:
    """The trials of a sweep whose folder this process has locked."""

    output: Path
    space: Space
    objective: Objective
    search: SearchSettings
    study: Study
    num_trials: int
    environments: Sequence[Mapping[str, str]]
    tell: Tell
    active: list[ActiveTrial] = field(default_factory=list)
    signal: signal.Signals | None = None
    is_exhausted: bool = False

    def run(self) -> Results:
        """Run trials until there are enough, or a signal stops the sweep."""
        waiting = [t.number for t in self.study.trials() if t.state is TrialState.RUNNING]
        with self._listening():
            while True:
                self._fill(waiting)
                if not self.active:
                    return self._write()
                for trial in list(self.active):
                    self._follow(trial)
                time.sleep(PAUSE)

    def _fill(self, waiting: list[int]) -> None:
        """Give free slots to half-run trials, then to new ones."""
        slots = set(range(len(self.environments))) - {trial.slot for trial in self.active}
        for slot in sorted(slots):
            number = None if self.signal is not None else self._next_trial(waiting)
            if number is None:
                return
            folder = trial_folder(self.output, number)
            self.active.append(ActiveTrial(number, folder, slot, RunFiles(folder)))

    def _next_trial(self, waiting: list[int]) -> int | None:
        """The number of a trial to run; None if there are enough."""
        while True:
            number = waiting.pop(0) if waiting else self._new_trial()
            if number is None or self._is_valid(number):
                return number

    def _new_trial(self) -> int | None:
        trials = self.study.trials()
        if self.is_exhausted or len(trials) >= self.num_trials:
            return None
        found = next_values(
            self.space, self.study, trials, sampler=self.search.sampler, seed=self.search.seed
        )
        if found is None:
            self.is_exhausted = True
            self.tell(f"all {len(trials)} combinations have been tried")
            return None
        folder = trial_folder(self.output, len(trials))
        if folder.exists():
            raise RunError(
                f"{folder}: exists, but the study of this sweep has no trial {len(trials)}; move "
                "the folder away, or choose another --output"
            )
        return self.study.add(found)

    def _is_valid(self, number: int) -> bool:
        """Whether a trial's values make a recipe; if not, it has failed."""
        values = self.study.values(self.study.trials()[number])
        try:
            self.space.recipe(values, trial_folder(self.output, number))
        except RecipeError as error:
            self._fail(number, " ".join(str(error).split()))
            return False
        return True

    def _begin(self, trial: ActiveTrial) -> None:
        """Start or resume the run of a trial, unless a process of an earlier launch still trains
        it."""
        if trial.run.is_training():
            if not trial.is_waiting:
                trial.is_waiting = True
                self.tell(f"trial {trial.number}: another process trains in its folder; waiting")
            return
        values = self.study.values(self.study.trials()[trial.number])
        path = files.recipe_path(self.output, trial.number)
        recipe = self.space.recipe(values, trial.folder)
        how = "resumed: " if (trial.folder / files.METRICS).exists() else ""
        files.write_text(path, text_of(recipe))
        self.tell(f"trial {trial.number}: {how}{shown(values)}")
        trial.process = trial_process.start(path, trial.folder, self.environments[trial.slot])
        if self.signal is not None:
            trial.process.stop(self.signal)
        self._write()

    def _follow(self, trial: ActiveTrial) -> None:
        """Look at a trial once: report what is new, and conclude it if it has ended."""
        if trial.process is None:
            if self.signal is not None:
                self.active.remove(trial)
            else:
                self._begin(trial)
            return
        code = trial.process.code()
        reports = self._reports(trial, is_ended=code in trial_process.ENDED)
        for report in reports[trial.num_reports :]:
            if not trial.is_pruned:
                self._report(trial, report)
        if code is not None:
            self.active.remove(trial)
            self._conclude(trial, code, reports)
            self._write()

    def _reports(self, trial: ActiveTrial, *, is_ended: bool) -> list[ReportedValue]:
        """The values of a trial so far."""
        if trial.total_steps is None:
            trial.total_steps = trial.run.total_steps()
            if trial.total_steps is None:
                return []
            self.study.note(trial.number, total_steps=trial.total_steps)
        return self.objective.reports(trial.run.records(), trial.total_steps, is_ended=is_ended)

    def _report(self, trial: ActiveTrial, report: ReportedValue) -> None:
        """ReportedValue a value, and let the trial end if it is a bad one."""
        self.study.report(trial.number, report)
        trial.num_reports += 1
        search = self.search
        if search.pruner == "none":
            return
        if report.value is None or self.study.should_prune(trial.number, search.prune_after):
            trial.is_pruned = True
            assert trial.process is not None
            trial.process.stop()

    def _conclude(self, trial: ActiveTrial, code: int, reports: Sequence[ReportedValue]) -> None:
        """Record the end of a trial whose process has ended."""
        metric, number = self.objective.metric, trial.number
        last = reports[trial.num_reports - 1] if trial.num_reports else None
        if trial.is_pruned and last is not None and last.value is not None:
            self.study.note(number, step=last.step, reason=f"worse than the median at {last.step}")
            self.study.end(number, TrialState.PRUNED, last.value)
            self.tell(f"trial {number}: pruned at step {last.step}, {metric} {last.value:.4g}")
        elif code in trial_process.STOPPED and not trial.is_pruned:
            self.tell(f"trial {number}: stopped; the same command resumes it")
        elif code not in trial_process.ENDED and not trial.is_pruned:
            self._fail(number, trial_process.why(code, trial.run.last_words()))
        elif (found := self.objective.outcome(reports)) is None:
            known = {name for record in trial.run.records() for name in record} - {"step"}
            self._fail(number, f"the run has no {metric}; it has {', '.join(sorted(known))}")
        elif found.value is None:
            self._fail(number, f"{metric} is NaN or infinite at step {found.step}")
        else:
            self._complete(trial, code, found.step, found.value)

    def _complete(self, trial: ActiveTrial, code: int, step: int, value: float) -> None:
        skipped = "skipped steps that were NaN or infinite" if code == SKIPPED_STEPS else None
        losses = fingerprint(trial.run.records())
        self.study.note(trial.number, step=step, losses=losses, reason=skipped)
        before = gather(self.study, self.num_trials, self.objective.metric).best
        self.study.end(trial.number, TrialState.COMPLETE, value)
        best = gather(self.study, self.num_trials, self.objective.metric).best
        is_best = best is not None and best != before
        note = ", the best so far" if is_best else ""
        note += f"; {skipped}" if skipped else ""
        self.tell(f"trial {trial.number}: complete, {self.objective.metric} {value:.6g}{note}")

    def _fail(self, number: int, reason: str) -> None:
        self.study.note(number, reason=reason)
        self.study.end(number, TrialState.FAIL)
        self.tell(f"trial {number}: failed: {reason}")

    def _write(self) -> Results:
        """Write results and the best recipe, as they are now."""
        metric, exhausted = self.objective.metric, self.is_exhausted
        found = gather(self.study, self.num_trials, metric, exhausted=exhausted)
        files.write_json(self.output / files.RESULTS, found.as_data())
        best = found.best
        if best is not None:
            folder = self.output / f"best-{best.folder}"
            text = text_of(self.space.recipe(best.values, folder))
            head = f"# {best.folder}: {self.objective}: {best.value:.6g} at step {best.step}\n"
            head += "# Written by surefoot sweep. Copy this file before you change it.\n"
            files.write_text(self.output / files.BEST, head + text)
        return found

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Inside, a signal stops the trials, which save."""
        heard = [s for s in STOP_SIGNALS if signal.getsignal(s) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._stop) for number in heard}
        try:
            yield
        finally:
            for trial in self.active:  # after an error
                if trial.process is not None:
                    trial.process.end()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        for trial in self.active:
            if trial.process is not None and not trial.is_pruned:  # which is told already
                trial.process.stop(number)


def shown(values: Values) -> str:
    """Values as they are typed."""
    return " ".join(f"{key}={_number(value)}" for key, value in values.items())


def _number(value: object) -> str:
    if value is None:
        return "NaN or infinite"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
