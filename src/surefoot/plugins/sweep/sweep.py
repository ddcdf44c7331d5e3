"""A sweep from its first trial to its last: starts trials, follows them, ends bad ones early.

study.journal   the study, in optuna's own format: what is searched, which trials there are, and how
                they ended
results.json    every trial with its values and its result; replaced whenever something changes
recipes/        the recipe of every trial, for ``surefoot train``
trial-0000/     the run of a trial
best.yaml       the recipe of the best complete trial, with a new folder for its run
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import signal
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

import optuna
from optuna.trial import TrialState

from ...errors import SKIPPED_STEPS, STOP_SIGNALS, RecipeError, RunError
from ...recipe.comparison import changes
from ...recipe.recipe import read
from ...storage.files import exists, make_folder, names_in, open_inside, raising, write_aside
from ...storage.folder_lock import NAME as RUN_LOCK
from ...storage.folder_lock import is_held
from ...training.callbacks.launches import LOG, Follower, last_heartbeat, record
from .objective import Evaluation, Objective, Record
from .space import Space, Values, plain, text_of
from .study import (
    STUDY,
    Results,
    add,
    folder_name,
    gather,
    next_values,
    open_study,
    running,
    should_prune,
    values_of,
)

METRICS, RESULTS, BEST, LOCK = "metrics.jsonl", "results.json", "best.yaml", ".sweep.lock"
_SEARCH = "search"  # the attribute of the study that has the settings of the sweep
_PAUSE = 0.2  # seconds between two looks at the trials
_SECONDS_TO_SAVE = 120.0  # of a run that has received SIGTERM
_TAIL = 1 << 14  # bytes of a log in which its last lines are
_END = object()
_KILLED = "was_killed"  # the attribute of a trial that was resumed after a kill
_RUN_RESULTS = "all_results.json"  # in the folder of a run that is complete


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """How many trials there are, how their values are chosen, and which end early."""

    num_trials: int
    sampler: str
    seed: int
    pruner: str
    prune_after: int


class TrialProcess(Protocol):
    """The process of a trial, as ``subprocess.Popen``, wherever it runs."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs. Raises ``RunError``: it cannot be started."""

    def send_signal(self, sig: int, /) -> None:
        """Send a signal to it."""


# From the folder of a run and the arguments of ``surefoot`` that train in it.
StartTrial = Callable[[Path, Sequence[str]], TrialProcess]


@dataclass
class Sweep:
    """The trials of a sweep whose folder this process has locked."""

    output: Path
    space: Space
    objective: Objective
    search: SearchSettings
    starts: Sequence[StartTrial]  # for each of the trials at once
    tell: Callable[[str], None]
    study: optuna.Study = field(init=False)
    signals: list[signal.Signals] = field(default_factory=list)  # that have stopped the sweep

    def __post_init__(self) -> None:
        """Open the study. Raises ``RunError`` if the folder contains another sweep."""
        names = ("trial-", "checkpoint-", METRICS, BEST)
        of_others = [name for name in names_in(self.output) if name.startswith(names)]
        if of_others and not (self.output / STUDY).exists():
            raise RunError(
                f"{self.output}: contains {of_others[0]}, but no {STUDY}, which says what the "
                "trials of a sweep are; restore it, or choose another --output"
            )
        self.study = open_study(self.output, self.objective.direction)
        search = {
            "ranges": " ".join(f"{key.key}={key.text}" for key in self.space.keys),
            "objective": str(self.objective),
            **asdict(self.search),
            "recipe": plain(self.space.base),
        }
        before = self.study.user_attrs.get(_SEARCH)
        if before is None:
            if self.study.get_trials(deepcopy=False):
                raise RunError(
                    f"{self.output}: its trials are of an earlier version, and {STUDY} does not "
                    "say what was searched; choose another --output"
                )
            self.study.set_user_attr(_SEARCH, search)
            return
        differing = [
            f"{name}: {before[name]} -> {search[name]}"
            for name in search
            if name not in ("num_trials", "recipe") and before[name] != search[name]
        ]
        # As recipes, so that the form of a text is no difference.
        differing += map(str, changes(read(before["recipe"]), self.space.base))
        if differing:
            raise RunError(
                f"{self.output}: contains a sweep with other settings ("
                f"{'; '.join(differing[:4])}). To continue it, start it as it began, with more "
                "--trials if you like; for another sweep, choose another --output"
            )

    def run(self) -> Results:
        """Run trials until there are enough, or a signal stops the sweep."""
        trials = self._trials()
        active: dict[int, Generator[None]] = {}  # by the number of its start
        # What is ignored stays so, as SIGHUP under nohup.
        handled = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        handlers = {number: signal.signal(number, self._stop) for number in handled}
        try:
            while True:
                for slot, start in enumerate(self.starts):
                    is_free = slot not in active and not self.signals
                    if is_free and (trial := next(trials, None)) is not None:
                        active[slot] = self._train(*trial, start)
                if not active:
                    return self._write()
                for slot, training in list(active.items()):
                    if next(training, _END) is _END:
                        del active[slot]
                time.sleep(_PAUSE)
        finally:
            for training in active.values():  # after an error
                training.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        """Note a signal, which is passed to the trials, which save."""
        self.signals.append(signal.Signals(number))

    def _trials(self) -> Iterator[tuple[int, Values]]:
        """Number and values of the trials to run: half-run ones, then new ones until there are
        enough. Those whose values contradict each other fail."""
        half_run = self.study.get_trials(states=[TrialState.RUNNING])
        for number in itertools.chain((trial.number for trial in half_run), self._new_trials()):
            values = values_of(self.space, self.study.get_trials(deepcopy=False)[number])
            try:
                self.space.recipe(values, self.output)
            except RecipeError as error:
                self._fail(number, " ".join(str(error).split()))
            else:
                yield number, values

    def _new_trials(self) -> Iterator[int]:
        while (number := len(self.study.get_trials(deepcopy=False))) < self.search.num_trials:
            values = next_values(self.space, self.study, self.search.sampler, self.search.seed)
            if values is None:
                self.tell(f"all {number} combinations have been tried")
                return
            if (folder := self.output / folder_name(number)).exists():
                raise RunError(
                    f"{folder}: exists, but the study of this sweep has no trial {number}; move "
                    "the folder away, or choose another --output"
                )
            yield add(self.study, self.space, values)

    def _train(self, number: int, values: Values, start: StartTrial) -> Generator[None]:
        """Start or resume the run of a trial, and follow it to its end; between two looks the
        others have their turn."""
        folder = self.output / folder_name(number)
        if is_held(folder / RUN_LOCK):
            self.tell(f"trial {number}: another process trains in its folder; waiting")
        while is_held(folder / RUN_LOCK):  # started by a sweep that was killed; it saves, and ends
            if self.signals:
                return
            yield
        path = self.output / f"recipes/{folder.name}.yaml"
        _write_text(path, text_of(self.space.recipe(values, folder)))
        how = "resumed: " if (folder / METRICS).exists() else ""
        self.tell(f"trial {number}: {how}{_as_typed(values)}")
        code, records, pruned = yield from self._followed(number, folder, path, start)
        # A process that something else has killed, as what frees memory does, takes neither the
        # results of its run along nor its checkpoints.
        is_killed = code > 128 and code - 128 not in STOP_SIGNALS
        if is_killed and pruned is None and not self.signals:
            if exists(folder / _RUN_RESULTS):
                code = 0
            elif _KILLED not in self.study.get_trials(deepcopy=False)[number].user_attrs:
                running(self.study, number).set_user_attr(_KILLED, True)
                self.tell(f"trial {number}: {_why_failed(folder, code)}; resumed, once")
                code, records, pruned = yield from self._followed(number, folder, path, start)
        self._conclude(number, code, records, pruned)
        self._write()

    def _followed(
        self, number: int, folder: Path, path: Path, start: StartTrial
    ) -> Generator[None, None, tuple[int, Sequence[Record], Evaluation | None]]:
        """Train by the recipe at ``path``; the exit code, what was logged, and the evaluation for
        which the trial was pruned."""
        process = start(folder, ["train", str(path)])
        self._write()
        metrics, records = Follower(folder / METRICS), list[Record]()
        num_reports, num_signals, pruned, code = 0, 0, None, None
        try:
            while code is None:
                code = process.poll()  # first: a run that has ended logs nothing more
                lines, is_other_file = metrics.read()  # as after a rollback
                records = [*([] if is_other_file else records), *filter(None, map(record, lines))]
                if pruned is None:  # else it saves, and ends
                    new = self.objective.evaluations(records)[num_reports:]
                    pruned = next((e for e in new if self._is_bad(number, folder, *e)), None)
                    received = self.signals[num_signals:]
                    for signal_number in received if pruned is None else (signal.SIGTERM,):
                        process.send_signal(signal_number)
                    num_reports, num_signals = num_reports + len(new), num_signals + len(received)
                if code is None:
                    yield
        finally:
            if process.poll() is None:  # after an error
                process.send_signal(signal.SIGTERM)
                deadline = time.monotonic() + _SECONDS_TO_SAVE
                while process.poll() is None and time.monotonic() < deadline:
                    time.sleep(_PAUSE)
        # A run that a signal has ended has its number, negated; a shell says 128 and the number.
        return 128 - code if code < 0 else code, records, pruned

    def _is_bad(self, number: int, folder: Path, step: int, value: float) -> bool:
        """Report an evaluation; whether the trial is to end for it."""
        trial, reports = running(self.study, number), self.study.get_trials(deepcopy=False)[number]
        # From the heartbeat: a recipe with epochs does not say how many steps they are.
        total = last_heartbeat(folder).get("max_steps")
        if "total_steps" not in reports.user_attrs and total is not None:
            trial.set_user_attr("total_steps", total)
        # A resumed trial logs steps again, and optuna warns of a second report.
        if step not in reports.intermediate_values:
            trial.report(value, step)
        if self.search.pruner == "none":
            return False
        return math.isnan(value) or should_prune(self.study, number, self.search.prune_after)

    def _conclude(
        self, number: int, code: int, records: Sequence[Record], pruned: Evaluation | None
    ) -> None:
        """Record the end of a trial whose process has ended; ``pruned`` is the evaluation for which
        it was."""
        metric, outcome = self.objective.metric, self.objective.outcome(records)
        if pruned is not None and math.isfinite(pruned[1]):
            step, value = pruned
            reason = f"worse than the median at {step}"
            self._end(number, TrialState.PRUNED, step=step, reason=reason)
            self.tell(f"trial {number}: pruned at step {step}, {metric} {value:.4g}")
        elif pruned is None and code - 128 in STOP_SIGNALS:
            self.tell(f"trial {number}: stopped; the same command resumes it")
        elif pruned is None and code not in (0, SKIPPED_STEPS):
            self._fail(number, _why_failed(self.output / folder_name(number), code))
        elif outcome is None:
            names = {name for record in records for name in record} - {"step"}
            self._fail(number, f"the run has no {metric}; it has {', '.join(sorted(names))}")
        elif math.isnan(outcome[1]):
            self._fail(number, f"{metric} is NaN or infinite at step {outcome[0]}")
        else:
            step, value = outcome
            note = "skipped steps that were NaN or infinite" if code == SKIPPED_STEPS else None
            self._end(number, TrialState.COMPLETE, value, step=step, reason=note)
            best = gather(self.study, self.space, metric).best
            remark = ", the best so far" if best is not None and best.number == number else ""
            remark += f"; {note}" if note else ""
            self.tell(f"trial {number}: complete, {metric} {value:.6g}{remark}")

    def _fail(self, number: int, reason: str) -> None:
        self._end(number, TrialState.FAIL, reason=reason)
        self.tell(f"trial {number}: failed: {reason}")

    def _end(
        self, number: int, state: TrialState, value: float | None = None, **facts: object
    ) -> None:
        for name, fact in facts.items():
            running(self.study, number).set_user_attr(name, fact)
        self.study.tell(number, value, state)  # a pruned one has its last report as its value

    def _write(self) -> Results:
        """Write results and the best recipe, as they are now."""
        results = gather(self.study, self.space, self.objective.metric)
        text = json.dumps(results.as_data(), indent=1, allow_nan=False)
        _write_text(self.output / RESULTS, f"{text}\n")
        if (best := results.best) is not None:
            text = text_of(self.space.recipe(best.values, self.output / f"best-{best.folder}"))
            head = f"# {best.folder}: {self.objective}: {best.value:.6g} at step {best.step}\n"
            head += "# Written by surefoot sweep. Copy this file before you change it.\n"
            _write_text(self.output / BEST, head + text)
        return results


def _write_text(path: Path, text: str) -> None:
    with raising(RunError, f"sweep: cannot write {path}"):
        make_folder(path.parent)
        write_aside(path, text.encode())


def _as_typed(values: Values) -> str:
    return " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in values.items()
    )


def _why_failed(folder: Path, code: int) -> str:
    """Why the run in ``folder`` failed: the error at the end of its log."""
    if code == 128 + signal.SIGKILL:
        return "killed by SIGKILL, by hand or because memory was short"
    if code > 128:
        return f"killed by signal {code - 128}"
    log = ""
    with contextlib.suppress(OSError), open_inside(folder, LOG) as file:
        log = file.read_up_to(max(0, file.size - _TAIL), _TAIL).decode(errors="replace")
    launch = log.rpartition("$ surefoot train ")[2]
    _, sign, error = launch.rpartition("error:")
    last_line = launch.strip().rpartition("\n")[2]
    return " ".join((error if sign else last_line).split()) or f"ended with exit code {code}"
