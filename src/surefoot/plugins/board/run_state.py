"""State of a run, from evidence: its lock, its launches, its results. Never a guess. And its row
in the table of runs: step, loss, metric, speed, time left.

``running``   a process holds the lock of the folder; without locks, or before it trains, is alive
``complete``  the last launch ended after the last step
``stopped``   a signal stopped it; it has saved, and can be resumed
``failed``    it ended with an error, which is known, or before it trained
``died``      no process holds the lock, and the last launch has no end: killed, or power lost
``ended``     no process holds the lock, and there is no record of its launches
``unknown``   the file system has no locks, and the process is on another machine
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...checkpoint.disk.retention import origin_of
from ...errors import SurefootError
from ...recipe.files import RUN_RECIPE, read_text
from ...recipe.yaml import parse
from ...storage import files
from ...storage.folder_lock import is_held
from ...terminal_text import plain
from ...training.callbacks.launches import HEARTBEAT, LOG, is_alive
from ...training.callbacks.launches import NAME as LAUNCHES
from .run_folders import LOCK, METRICS

EVIDENCE = {  # of a state, in words; the pages have them in Chinese, too
    "lock": "It is training.",
    "starting": "It is opening the model and the data, which takes seconds to minutes.",
    "not_begun": "It ended before its first step.",
    "process": "It is training on this machine.",
    "no_process": "It was killed, or the machine went down.",
    "no_locks": "It was started on another machine, and this one cannot see whether it still runs.",
    "end": "It has ended.",
    "no_end": "It was killed, or the machine went down.",
    "no_record": "There is no record of how it ended.",
}
TAIL = 1 << 18  # bytes of launches.jsonl that are enough for its last launch
MAX_SMALL = 1 << 20
_LOG_TAIL = 1 << 14  # bytes of a log that are enough for its last line
_MAX_REASON = 300  # characters
_TAIL = 1 << 16  # bytes of metrics.jsonl that hold the last log and the last evaluation
_STALLED = 600.0  # seconds without a step
Row = dict[str, Any]
_BY_PROCESS = {  # without locks, by whether its process is alive
    None: ("unknown", "no_locks"),
    True: ("running", "process"),
    False: ("died", "no_process"),
}


@dataclass(frozen=True)
class RunState:
    """The state, its evidence (a key of ``EVIDENCE``), and what is known besides."""

    name: str
    evidence: str
    launch: Mapping[str, object] | None = None  # the begin of the last launch
    end: Mapping[str, object] | None = None  # its end
    heartbeat: Mapping[str, object] | None = None
    process: Mapping[str, object] | None = None  # of a run that is running, if it is known
    surroundings: Mapping[str, object] | None = None  # of the last launch

    @property
    def change(self) -> str | None:
        """What the last launch has changed, and what that means for its steps; None if it resumed
        nothing, or has not recorded it."""
        record = self.surroundings or {}
        step, changed, means = (record.get(name) for name in ("since", "changed", "verdict"))
        if not isinstance(step, int) or not isinstance(changed, list):
            return None
        what = "; ".join(map(str, changed)) or "nothing has changed"
        return f"since step {step:,}: {what}; {means}"


def state_of(folder: Path) -> RunState:
    """The state of the run in ``folder``."""
    last: dict[object, Mapping[str, object]] = {}  # by event: what the records end with
    for line in tail(folder / LAUNCHES, TAIL).splitlines():
        row = parsed(line) or {}
        if row.get("event") == "launch":
            last = {}
        last[row.get("event")] = row
    start, launch, end = (last.get(event) for event in ("start", "launch", "end"))
    surroundings = last.get("surroundings")
    try:
        heartbeat = parsed(files.read_inside(folder, HEARTBEAT, MAX_SMALL))
    except OSError:
        heartbeat = None
    locked = is_locked(folder)
    process = launch or heartbeat
    # A heartbeat decides nothing: in a long evaluation, or on a suspended machine, it is old, and
    # the run lives (decisions/0062).
    if locked:
        name, evidence = "running", "lock"
    elif start is not None and is_alive(start):
        name, evidence, process = "running", "starting", start
    elif start is not None and launch is None:
        name, evidence = "failed", "not_begun"
    elif end is not None:
        outcome = end.get("outcome")
        is_outcome = outcome in ("complete", "stopped", "failed")
        name, evidence = str(outcome) if is_outcome else "ended", "end"
    elif locked is None and process is not None:
        name, evidence = _BY_PROCESS[is_alive(heartbeat or process)]
    elif launch is not None:
        name, evidence = "died", "no_end"
    else:
        name, evidence = "ended", "no_record"
    return RunState(name, evidence, launch, end, heartbeat, process, surroundings)


def has_begun(folder: Path) -> bool:
    """Whether the run came so far that it can be resumed or talked to: it keeps its recipe before
    its first step."""
    return (folder / RUN_RECIPE).is_file() or (folder / METRICS).is_file()


def why_not_begun(folder: Path, state: RunState) -> str | None:
    """The error of a run that did not begin: as it was recorded, or the last line of its log."""
    error = (state.end or {}).get("error")
    lines = str(error or "").splitlines()[:1]
    if not lines:
        log = tail(folder / LOG, _LOG_TAIL).decode(errors="replace")
        lines = [line for line in log.splitlines() if line.strip()][-1:]
    return lines[0].removeprefix("error: ")[:_MAX_REASON] if lines else None


def is_locked(folder: Path) -> bool | None:
    """Whether a process holds the run's lock; None if the file system has none."""
    return is_held(folder / LOCK)


def parsed(line: bytes) -> dict[str, object] | None:
    """The object in a line, fit to be shown; None if it is no JSON object."""
    try:
        content = plain(files.parse_json(line))
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def tail(path: Path, length: int) -> bytes:
    """The last whole lines of a file, at most ``length`` bytes; nothing if it cannot be read."""
    try:
        with files.open_inside(path.parent, path.name) as file:
            start = max(0, file.size - length)
            data = file.read(start, file.size - start)
    except OSError:
        return b""
    # The first line may have been cut.
    return data.partition(b"\n")[2] if start else data


@dataclass
class Summaries:
    """Rows of runs. What recipes say is kept, since reading one costs five times the rest."""

    root: Path
    _facts: dict[Path, tuple[object, Row]] = field(default_factory=dict)

    def of(self, folder: Path) -> Row:
        """The row of a run."""
        state, is_begun = state_of(folder), has_begun(folder)
        is_running = state.name == "running"
        beat, end = state.heartbeat or {}, state.end or {}
        train, evaluation, is_broken = last_rows(folder)
        facts = self._facts_of(folder)
        steps = [row.get("step") for row in (beat, train, end)]
        # Each is written at another moment; the largest is the latest.
        step = max((value for value in steps if type(value) is int), default=None)
        total = beat.get("max_steps", step if state.name == "complete" else None)
        # Clocks differ: a heartbeat of another machine may be of the future.
        silent = max(0.0, time.time() - since) if (since := figure(beat.get("time"))) else None
        metric = facts.get("best_metric", "eval_loss")
        return {
            "run": folder.relative_to(self.root).as_posix(),
            "name": folder.name,
            "state": state.name,
            "evidence": state.evidence,
            "because": EVIDENCE[state.evidence],
            "launch": state.launch,
            "end": state.end,
            "change": state.change,
            "silent_seconds": silent,
            "is_stalled": is_running and silent is not None and silent > _STALLED,
            "has_begun": is_begun,
            "reason": None if is_begun or is_running else why_not_begun(folder, state),
            "step": step,
            "max_steps": total if type(total) is int else None,
            "loss": figure(train.get("loss")),
            "metric": {"name": metric, "value": figure(evaluation.get(metric))},
            "speed": figure(train.get("tokens_per_second")),
            "seconds_left": _seconds_left(beat, step, total) if is_running else None,
            "changed": changed(folder),
            "broken_metrics": is_broken,
            **facts,
            **({} if is_begun else {"recipe_problem": None}),
        }

    def _facts_of(self, folder: Path) -> Row:
        """What the recipe says; read again if it was replaced."""
        stamp, cached = _stamp(folder / RUN_RECIPE), self._facts.get(folder)
        if cached is None or cached[0] != stamp:
            cached = self._facts[folder] = stamp, self._recipe_facts(folder)
        return cached[1]

    def _recipe_facts(self, folder: Path) -> Row:
        try:
            data = parse(read_text(folder / RUN_RECIPE, follow=False), RUN_RECIPE).data
        except (SurefootError, OSError) as error:
            return {"recipe_problem": str(error)}
        sections = data if isinstance(data, dict) else {}

        def setting(section: str, name: str) -> str:
            values = sections.get(section)
            return str(values.get(name) or "") if isinstance(values, dict) else ""

        resume = setting("checkpoint", "resume")
        if (origin := origin_of(folder)) is not None:
            resume = f"{origin[0]}/checkpoint-{origin[1]}"
        resume = resume.removeprefix(f"{self.root}/")
        return {
            "model": setting("model", "path").rstrip("/").rpartition("/")[2],
            "stage": _variant(sections.get("stage")),
            "method": _variant(sections.get("method")) or "full",
            "best_metric": setting("train", "metric_for_best_model") or "eval_loss",
            "begins_with": resume if "checkpoint-" in resume else None,
        }


def last_rows(folder: Path) -> tuple[Row, Row, bool]:
    """The last log and the last evaluation, and whether a line among them or after is broken."""
    train, evaluation, is_broken = Row(), Row(), False
    for line in reversed(tail(folder / METRICS, _TAIL).split(b"\n")[:-1]):
        row = parsed(line)
        if row is None or type(row.get("step")) is not int:
            is_broken = True
        elif "loss" in row:
            train = train or row
        else:
            evaluation = evaluation or row
        if train and evaluation:
            break
    return train, evaluation, is_broken


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Another one if a file was replaced; of a folder, if a checkpoint or a file came or went."""
    try:
        stat = path.lstat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _variant(value: object) -> str:
    return str(next(iter(value), "") if isinstance(value, Mapping) else value or "")


def _seconds_left(beat: Mapping[str, object], step: int | None, total: object) -> float | None:
    """By the speed of this launch: earlier ones may have run elsewhere."""
    began, now, first = (figure(beat.get(name)) for name in ("since", "time", "first_step"))
    if began is None or now is None or first is None or step is None or step <= first:
        return None
    return (now - began) / (step - first) * max(0, total - step) if isinstance(total, int) else None


def changed(folder: Path) -> float | None:
    """When a file of the run last changed, in seconds since 1970."""
    stamps = [_stamp(folder / name) for name in (METRICS, RUN_RECIPE, LAUNCHES, HEARTBEAT)]
    return max((stamp[2] / 1e9 for stamp in stamps if stamp is not None), default=None)


def figure(value: object) -> float | None:
    """A figure that can be shown; None for what is none, or not finite."""
    is_number = type(value) in (int, float)
    return value if is_number and math.isfinite(value) else None  # type: ignore[arg-type,return-value]
