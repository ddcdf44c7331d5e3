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
import json
import math
import os
import signal
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

import optuna
from optuna.trial import TrialState

from ...errors import SKIPPED_STEPS, STOP_SIGNALS, RecipeError, RunError
from ...recipe.recipe import changes, read
from ...storage.child import LAUNCHER
from ...storage.files import (
    make_folder,
    names_in,
    open_inside,
    parse_json,
    raising,
    read_inside,
    write_aside,
)
from ...storage.folder_lock import NAME as RUN_LOCK
from ...storage.folder_lock import is_held
from ...training.callbacks.launches import HEARTBEAT, LOG, Follower, record, start_training
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
STOPPED = tuple(128 + number for number in STOP_SIGNALS)
ENDED = (0, SKIPPED_STEPS)
_SEARCH = "search"  # what the study says of the sweep
_PAUSE = 0.2  # seconds between two looks at the trials
_PATIENCE = 120.0  # seconds for a run to save
_TAIL = 1 << 14  # bytes of a log in which its last lines are
_MAX_BYTES = 1 << 20  # of a heartbeat
_END = object()


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


def start_here(
    folder: Path, arguments: Sequence[str], *, environment: Mapping[str, str]
) -> TrialProcess:
    """Start a trial on this machine, with ``environment`` beside that of this process. It saves and
    ends if this process dies."""
    environment = {**environment, LAUNCHER: str(os.getpid())}
    return start_training(folder, arguments, environment=environment)


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
    is_exhausted: bool = False

    def __post_init__(self) -> None:
        """Open the study. Raises ``RunError`` if the folder contains another sweep."""
        others = ("trial-", "checkpoint-", METRICS, BEST)
        taken = [name for name in names_in(self.output) if name.startswith(others)]
        if taken and not (self.output / STUDY).exists():
            raise RunError(
                f"{self.output}: contains {taken[0]}, but no {STUDY}, which says what the trials "
                "of a sweep are; restore it, or choose another --output"
            )
        self.study = open_study(self.output, self.objective.direction)
        search = {
            "ranges": " ".join(f"{key.key}={key.text}" for key in self.space.keys),
            "objective": str(self.objective),
            **asdict(self.search),
            "recipe": plain(self.space.base),
        }
        before = self.study.user_attrs.get(_SEARCH)
        if before is None and self.study.get_trials(deepcopy=False):
            raise RunError(
                f"{self.output}: its trials are of an earlier version, and {STUDY} does not say "
                "what was searched; choose another --output"
            )
        if before is None:
            self.study.set_user_attr(_SEARCH, search)
            return
        names = [name for name in search if name not in ("num_trials", "recipe")]
        differing = [
            f"{name}: {before[name]} -> {search[name]}"
            for name in names
            if before[name] != search[name]
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
        half_run = self.study.get_trials(states=[TrialState.RUNNING])
        waiting = [trial.number for trial in half_run]
        active: dict[int, Generator[None]] = {}  # by the number of its start
        # What is ignored stays so, as SIGHUP under nohup.
        heard = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._stop) for number in heard}
        try:
            while True:
                for slot, start in enumerate(self.starts):
                    is_free = slot not in active and not self.signals
                    if is_free and (number := self._next_trial(waiting)) is not None:
                        active[slot] = self._train(number, start)
                if not active:
                    return self._write()
                active = {
                    slot: trial for slot, trial in active.items() if next(trial, _END) is not _END
                }
                time.sleep(_PAUSE)
        finally:
            for trial in active.values():  # after an error
                trial.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        """Note a signal, which is passed to the trials, which save."""
        self.signals.append(signal.Signals(number))

    def _next_trial(self, waiting: list[int]) -> int | None:
        """The number of a trial to run: a half-run one, or a new one; None if there are enough."""
        while True:
            number = waiting.pop(0) if waiting else self._new_trial()
            if number is None:
                return None
            try:
                self.space.recipe(self._values(number), self.output)
                return number
            except RecipeError as error:  # its values contradict each other
                self._fail(number, " ".join(str(error).split()))

    def _new_trial(self) -> int | None:
        number = len(self.study.get_trials(deepcopy=False))
        if self.is_exhausted or number >= self.search.num_trials:
            return None
        values = next_values(self.space, self.study, self.search.sampler, self.search.seed)
        if values is None:
            self.is_exhausted = True
            self.tell(f"all {number} combinations have been tried")
            return None
        if (folder := self.output / folder_name(number)).exists():
            raise RunError(
                f"{folder}: exists, but the study of this sweep has no trial {number}; move the "
                "folder away, or choose another --output"
            )
        return add(self.study, self.space, values)

    def _values(self, number: int) -> Values:
        return values_of(self.space, self.study.get_trials(deepcopy=False)[number])

    def _train(self, number: int, start: StartTrial) -> Generator[None]:
        """Start or resume the run of a trial, and follow it to its end; between two looks the
        others have their turn."""
        folder, values = self.output / folder_name(number), self._values(number)
        if is_held(folder / RUN_LOCK):
            self.tell(f"trial {number}: another process trains in its folder; waiting")
        while is_held(folder / RUN_LOCK):  # started by a sweep that was killed; it saves, and ends
            if self.signals:
                return
            yield
        path = self.output / f"recipes/{folder.name}.yaml"
        write_text(path, text_of(self.space.recipe(values, folder)))
        how = "resumed: " if (folder / METRICS).exists() else ""
        self.tell(f"trial {number}: {how}{shown(values)}")
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
                deadline = time.monotonic() + _PATIENCE
                while process.poll() is None and time.monotonic() < deadline:
                    time.sleep(_PAUSE)
        # A run that a signal has ended has its number, negated; a shell says 128 and the number.
        self._conclude(number, 128 - code if code < 0 else code, records, pruned)
        self._write()

    def _is_bad(self, number: int, folder: Path, step: int, value: float) -> bool:
        """Report a value; whether the trial is to end for it."""
        handle = running(self.study, number)
        trial = self.study.get_trials(deepcopy=False)[number]
        # From the heartbeat: a recipe with epochs does not say how many steps they are.
        if "total_steps" not in trial.user_attrs:
            with contextlib.suppress(OSError, ValueError):
                heartbeat = parse_json(read_inside(folder, HEARTBEAT, _MAX_BYTES))
                handle.set_user_attr("total_steps", heartbeat["max_steps"])
        # A resumed trial logs steps again, and optuna warns of a second report.
        if step not in trial.intermediate_values:
            handle.report(value, step)
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
            self._end(
                number, TrialState.PRUNED, step=step, reason=f"worse than the median at {step}"
            )
            self.tell(f"trial {number}: pruned at step {step}, {metric} {value:.4g}")
        elif pruned is None and code in STOPPED:
            self.tell(f"trial {number}: stopped; the same command resumes it")
        elif pruned is None and code not in ENDED:
            self._fail(number, _why(self.output / folder_name(number), code))
        elif outcome is None:
            names = {name for record in records for name in record} - {"step"}
            self._fail(number, f"the run has no {metric}; it has {', '.join(sorted(names))}")
        elif math.isnan(outcome[1]):
            self._fail(number, f"{metric} is NaN or infinite at step {outcome[0]}")
        else:
            note = "skipped steps that were NaN or infinite" if code == SKIPPED_STEPS else None
            self._end(number, TrialState.COMPLETE, outcome[1], step=outcome[0], reason=note)
            best = gather(self.study, self.space, metric).best
            remark = ", the best so far" if best is not None and best.number == number else ""
            remark += f"; {note}" if note else ""
            self.tell(f"trial {number}: complete, {metric} {outcome[1]:.6g}{remark}")

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
        write_text(self.output / RESULTS, f"{text}\n")
        if (best := results.best) is not None:
            text = text_of(self.space.recipe(best.values, self.output / f"best-{best.folder}"))
            head = f"# {best.folder}: {self.objective}: {best.value:.6g} at step {best.step}\n"
            head += "# Written by surefoot sweep. Copy this file before you change it.\n"
            write_text(self.output / BEST, head + text)
        return results


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically. Raises ``RunError``."""
    with raising(RunError, f"sweep: cannot write {path}"):
        make_folder(path.parent)
        write_aside(path, text.encode())


def shown(values: Values) -> str:
    """Values as they are typed."""
    return " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in values.items()
    )


def _why(folder: Path, code: int) -> str:
    """Why the run in ``folder`` failed: the error at the end of its log."""
    if code == 128 + signal.SIGKILL:
        return "killed by SIGKILL, by hand or because memory was short"
    if code > 128:
        return f"killed by signal {code - 128}"
    try:
        with open_inside(folder, LOG) as log:
            text = log.read_up_to(max(0, log.size - _TAIL), _TAIL).decode(errors="replace")
    except OSError:
        text = ""
    text = text.rpartition("$ surefoot train ")[2]  # of this launch
    _, sign, error = text.rpartition("error:")
    lines = [line.strip() for line in (error if sign else text).splitlines() if line.strip()]
    words = " ".join(lines if sign else lines[-1:])
    return words or f"ended with exit code {code}"
