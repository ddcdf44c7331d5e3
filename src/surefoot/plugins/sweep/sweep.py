"""A sweep from its first trial to its last: starts trials, follows them, ends bad ones early.

sweep.json      the search: recipe, ranges, metric, sampler; written once
results.json    every trial with its values and its result; replaced whenever something changes
study.journal   the study, in optuna's own format: which trials there are, and how they ended
recipes/        the recipe of every trial, for ``surefoot train``
trial-0000/     the run of a trial
best.yaml       the recipe of the best complete trial, with a new folder for its run
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import optuna
from optuna.distributions import distribution_to_json
from optuna.trial import TrialState

from ...checkpoint.disk.commit import committed
from ...errors import SKIPPED_STEPS, STOP_SIGNALS, RecipeError, RunError
from ...recipe.recipe import Recipe, changes, read
from ...storage.child import LAUNCHER
from ...storage.files import (
    make_folder,
    open_inside,
    parse_json,
    raising,
    read_inside,
    write_aside,
)
from ...storage.folder_lock import NAME as RUN_LOCK
from ...storage.folder_lock import is_held
from ...training.callbacks.launches import HEARTBEAT, LOG, start_training
from .objective import Objective, Record, ReportedValue
from .space import Space, SweptKey, Values, plain, text_of
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

SPEC, RESULTS, BEST, LOCK = "sweep.json", "results.json", "best.yaml", ".sweep.lock"
PAUSE = 0.2  # seconds between two looks at the trials
_MAX_BYTES, _MAX_METRICS = 32 << 20, 1 << 30


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """How many trials there are, how their values are chosen, and which end early."""

    num_trials: int
    sampler: str
    seed: int
    pruner: str
    prune_after: int


@dataclass
class Sweep:
    """The trials of a sweep whose folder this process has locked."""

    output: Path
    space: Space
    objective: Objective
    search: SearchSettings
    environments: Sequence[Mapping[str, str]]
    tell: Callable[[str], None]
    study: optuna.Study = field(init=False)
    active: list[ActiveTrial] = field(default_factory=list)
    signal: signal.Signals | None = None
    is_exhausted: bool = False

    def __post_init__(self) -> None:
        """Raises ``RunError`` if the folder contains another sweep."""
        self._settle()
        self.study = open_study(self.output, self.objective.direction)

    def run(self) -> Results:
        """Run trials until there are enough, or a signal stops the sweep."""
        half_run = self.study.get_trials(states=[TrialState.RUNNING])
        waiting = [trial.number for trial in half_run]
        with self._listening():
            while True:
                for slot in set(range(len(self.environments))) - {one.slot for one in self.active}:
                    number = None if self.signal is not None else self._next_trial(waiting)
                    if number is not None:
                        self.active.append(ActiveTrial(number, self._folder(number), slot))
                if not self.active:
                    return self._write()
                for trial in list(self.active):
                    self._follow(trial)
                time.sleep(PAUSE)

    def _settle(self) -> None:
        """Write what the sweep is into a new folder; compare it with that of an old one."""
        spec = {
            "keys": [{"key": key.key, "range": key.text, **_ends(key)} for key in self.space.keys],
            "objective": {**vars(self.objective), "sentence": str(self.objective)},
            "sampler": self.search.sampler,
            "seed": self.search.seed,
            "pruner": self.search.pruner,
            "prune_after": self.search.prune_after,
            "recipe": plain(self.space.base),
        }
        others = ("trial-", "checkpoint-", METRICS, STUDY, BEST)
        taken = [path.name for path in self.output.glob("*") if path.name.startswith(others)]
        if not (self.output / SPEC).exists():
            if taken:
                raise RunError(
                    f"{self.output}: contains {min(taken)}, but no {SPEC}, so no sweep "
                    "wrote it; choose another --output"
                )
            write_text(self.output / SPEC, json.dumps(spec, indent=1))
            return
        if STUDY not in taken and taken:
            raise RunError(
                f"{self.output}: has trials, but no {STUDY}, which says what they are; "
                "restore it, or choose another --output"
            )
        try:
            known = parse_json(read_inside(self.output, SPEC, _MAX_BYTES))
            differing = [*_differing(known, spec, self.space.base)]
        except (OSError, ValueError, KeyError, TypeError, RecipeError) as error:
            raise RunError(
                f"{self.output / SPEC}: cannot be read ({error}); restore it, or choose "
                "another --output"
            ) from None
        if differing:
            raise RunError(
                f"{self.output}: contains a sweep with other settings ("
                f"{'; '.join(differing[:4])}). To continue it, start it as it began, with more "
                "--trials if you like; for another sweep, choose another --output"
            )

    def _folder(self, number: int) -> Path:
        return self.output / folder_name(number)

    def _next_trial(self, waiting: list[int]) -> int | None:
        """The number of a trial to run; None if there are enough."""
        while True:
            number = waiting.pop(0) if waiting else self._new_trial()
            if number is None:
                return None
            try:
                self._recipe(number)
                return number
            except RecipeError as error:  # its values contradict each other
                self._fail(number, " ".join(str(error).split()))

    def _new_trial(self) -> int | None:
        number = len(self.study.get_trials(deepcopy=False))
        if self.is_exhausted or number >= self.search.num_trials:
            return None
        found = next_values(self.space, self.study, self.search.sampler, self.search.seed)
        if found is None:
            self.is_exhausted = True
            self.tell(f"all {number} combinations have been tried")
            return None
        if (folder := self._folder(number)).exists():
            raise RunError(
                f"{folder}: exists, but the study of this sweep has no trial {number}; move the "
                "folder away, or choose another --output"
            )
        return add(self.study, self.space, found)

    def _recipe(self, number: int) -> Recipe:
        return self.space.recipe(self._values(number), self._folder(number))

    def _values(self, number: int) -> Values:
        return values_of(self.space, self.study.get_trials(deepcopy=False)[number])

    def _follow(self, trial: ActiveTrial) -> None:
        """Look at a trial once: report what is new, and conclude it if it has ended."""
        if trial.process is None:
            if self.signal is not None:
                self.active.remove(trial)
            else:
                self._begin(trial)
            return
        code = trial.code()
        reports = self._reports(trial, is_ended=code in ENDED)
        for report in reports[trial.num_reports :]:
            if not trial.is_pruned:
                self._report(trial, *report)
        if code is not None:
            self.active.remove(trial)
            self._conclude(trial, code, reports)
            self._write()

    def _begin(self, trial: ActiveTrial) -> None:
        """Start or resume the run of a trial, unless a process of an earlier launch still trains
        it."""
        if trial.is_training():
            if not trial.is_waiting:
                trial.is_waiting = True
                self.tell(f"trial {trial.number}: another process trains in its folder; waiting")
            return
        path = self.output / "recipes" / f"{trial.folder.name}.yaml"
        write_text(path, text_of(self._recipe(trial.number)))
        how = "resumed: " if (trial.folder / METRICS).exists() else ""
        self.tell(f"trial {trial.number}: {how}{shown(self._values(trial.number))}")
        trial.begin(path, self.environments[trial.slot])
        if self.signal is not None:
            trial.stop(self.signal)
        self._write()

    def _reports(self, trial: ActiveTrial, *, is_ended: bool) -> list[ReportedValue]:
        """The values of a trial so far."""
        if (total := trial.total_steps()) is None:
            return []
        self._note(trial.number, total_steps=total)
        return self.objective.reports(trial.records(), total, is_ended=is_ended)

    def _report(self, trial: ActiveTrial, step: int, value: float) -> None:
        """Report a value, and let the trial end if it is a bad one."""
        known = self.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        if step not in known:
            running(self.study, trial.number).report(value, step)
        trial.num_reports += 1
        after = self.search.prune_after
        if self.search.pruner != "none" and (
            math.isnan(value) or should_prune(self.study, trial.number, after)
        ):
            trial.is_pruned = True
            trial.stop()

    def _conclude(self, trial: ActiveTrial, code: int, reports: Sequence[ReportedValue]) -> None:
        """Record the end of a trial whose process has ended."""
        metric, number = self.objective.metric, trial.number
        if trial.is_pruned and math.isfinite((last := reports[trial.num_reports - 1])[1]):
            reason = f"worse than the median at {last[0]}"
            self._end(number, TrialState.PRUNED, step=last[0], reason=reason)
            self.tell(f"trial {number}: pruned at step {last[0]}, {metric} {last[1]:.4g}")
        elif code in STOPPED and not trial.is_pruned:
            self.tell(f"trial {number}: stopped; the same command resumes it")
        elif code not in ENDED and not trial.is_pruned:
            self._fail(number, trial.why(code))
        elif (found := self.objective.outcome(reports)) is None:
            known = {name for record in trial.records() for name in record} - {"step"}
            self._fail(number, f"the run has no {metric}; it has {', '.join(sorted(known))}")
        elif math.isnan(found[1]):
            self._fail(number, f"{metric} is NaN or infinite at step {found[0]}")
        else:
            skipped = code == SKIPPED_STEPS
            note = "skipped steps that were NaN or infinite" if skipped else None
            losses = [(one["step"], one["loss"]) for one in trial.records() if "loss" in one]
            print_ = hashlib.blake2b(json.dumps(losses).encode(), digest_size=8).hexdigest()
            facts = {"step": found[0], "losses": print_, "reason": note}
            self._end(number, TrialState.COMPLETE, found[1], **facts)
            best = self._results().best
            is_best = best is not None and best.number == number
            note = f"; {note}" if note else ""
            note = f"{', the best so far' if is_best else ''}{note}"
            self.tell(f"trial {number}: complete, {metric} {found[1]:.6g}{note}")

    def _fail(self, number: int, reason: str) -> None:
        self._end(number, TrialState.FAIL, reason=reason)
        self.tell(f"trial {number}: failed: {reason}")

    def _end(
        self, number: int, state: TrialState, value: float | None = None, **facts: object
    ) -> None:
        self._note(number, **facts)
        self.study.tell(number, value, state)  # a pruned one has its last report as its value

    def _note(self, number: int, **facts: object) -> None:
        known = self.study.get_trials(deepcopy=False)[number].user_attrs
        for name, fact in facts.items():
            if known.get(name) != fact:
                running(self.study, number).set_user_attr(name, fact)

    def _results(self) -> Results:
        requested, metric = self.search.num_trials, self.objective.metric
        return gather(self.study, self.space, requested, metric, exhausted=self.is_exhausted)

    def _write(self) -> Results:
        """Write results and the best recipe, as they are now."""
        found = self._results()
        write_text(
            self.output / RESULTS, json.dumps(found.as_data(), indent=1, allow_nan=False) + "\n"
        )
        if (best := found.best) is not None:
            text = text_of(self.space.recipe(best.values, self.output / f"best-{best.folder}"))
            head = f"# {best.folder}: {self.objective}: {best.value:.6g} at step {best.step}\n"
            head += "# Written by surefoot sweep. Copy this file before you change it.\n"
            write_text(self.output / BEST, head + text)
        return found

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Inside, a signal stops the trials, which save."""
        heard = [s for s in STOP_SIGNALS if signal.getsignal(s) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._stop) for number in heard}
        try:
            yield
        finally:
            for trial in self.active:  # after an error
                trial.end()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        for trial in self.active:
            if not trial.is_pruned:  # which is told already
                trial.stop(number)


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


def _ends(key: SweptKey) -> dict[str, object]:
    """A range in optuna's words, and its choices as values."""
    found: dict[str, object] = parse_json(distribution_to_json(key.distribution))["attributes"]
    return found | ({"choices": key.values()} if "choices" in found else {})


def _differing(known: Any, spec: Any, base: Recipe) -> Iterator[str]:
    """What differs between two sweeps, however it is worded."""
    was, now = (" ".join(f"{k['key']}={k['range']}" for k in one["keys"]) for one in (known, spec))
    if was != now:
        yield f"ranges: {was} -> {now}"
    before, after = known["objective"], spec["objective"]
    if {**before, "sentence": None} != {**after, "sentence": None}:
        yield f"objective: {before['sentence']} -> {after['sentence']}"
    for name in ("sampler", "seed", "pruner", "prune_after"):
        if known[name] != spec[name]:
            yield f"{name}: {known[name]} -> {spec[name]}"
    yield from map(str, changes(read(known["recipe"]), base))


METRICS = "metrics.jsonl"
STOPPED = tuple(128 + number for number in STOP_SIGNALS)
ENDED = (0, SKIPPED_STEPS)
_RESULTS, _STATE = "all_results.json", "trainer_state.json"
_PATIENCE = 120.0  # seconds for a run to save
_TAIL = 1 << 14  # bytes of a log in which its last lines are


@dataclass
class ActiveTrial:
    """A trial that has a slot: ``surefoot train`` in a process of its own, and what its files
    say. It runs, or waits for the process of an earlier launch to end."""

    number: int
    folder: Path
    slot: int
    process: subprocess.Popen[bytes] | None = None
    is_pruned: bool = False
    is_waiting: bool = False
    num_reports: int = 0  # that are in the study
    _size: int = -1
    _records: list[Record] = field(default_factory=list)

    def begin(self, recipe: Path, environment: Mapping[str, str]) -> None:
        """Train ``recipe``, or resume its run. The process saves and ends if this one dies. Raises
        ``RunError``."""
        own = {**environment, LAUNCHER: str(os.getpid())}
        self.process = start_training(self.folder, ["train", str(recipe)], environment=own)

    def code(self) -> int | None:
        """Its exit code as a shell has it; None while it runs."""
        code = self.process.poll() if self.process else None
        return 128 - code if code is not None and code < 0 else code

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Let it finish its step, save and exit."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def end(self) -> None:
        """Stop it, and wait until it has saved."""
        self.stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.process is not None:
                self.process.wait(_PATIENCE)

    def is_training(self) -> bool:
        """Whether a process trains in the folder."""
        return is_held(self.folder / RUN_LOCK) is True

    def records(self) -> list[Record]:
        """The complete lines of ``metrics.jsonl``."""
        with contextlib.suppress(OSError):
            if (size := (self.folder / METRICS).stat().st_size) != self._size:
                lines = read_inside(self.folder, METRICS, _MAX_METRICS).split(b"\n")[:-1]
                self._size, self._records = size, [json.loads(line) for line in lines]
        return self._records

    def total_steps(self) -> int | None:
        """The length of the run; None before its first step."""
        places = [(self.folder, HEARTBEAT)]
        if (self.folder / _RESULTS).exists():  # a launch that finds the run complete takes no step
            places += [(path, _STATE) for path in committed(self.folder)[-1:]]
        for folder, name in places:
            with contextlib.suppress(OSError, ValueError):
                total = parse_json(read_inside(folder, name, _MAX_BYTES)).get("max_steps")
                if isinstance(total, int):
                    return total
        return None

    def why(self, code: int) -> str:
        """Why it failed: the error at the end of its log."""
        if code == 128 + signal.SIGKILL:
            return "killed by SIGKILL, by hand or because memory was short"
        if code > 128:
            return f"killed by signal {code - 128}"
        try:
            with open_inside(self.folder, LOG) as log:
                text = log.read_up_to(max(0, log.size - _TAIL), _TAIL).decode(errors="replace")
        except OSError:
            text = ""
        text = text.rpartition("$ surefoot train ")[2]  # of this launch
        _, sign, error = text.rpartition("error:")
        lines = [line.strip() for line in (error if sign else text).splitlines() if line.strip()]
        words = " ".join(lines if sign else lines[-1:])
        return words or f"ended with exit code {code}"
