"""State of a run, from evidence: its lock, its launches, its results. Never a guess.

``running``   a process holds the lock of the folder; without locks, or before it trains, is alive
``complete``  the last launch ended after the last step
``stopped``   a signal stopped it; it has saved, and can be resumed
``failed``    it ended with an error, which is known, or before it trained
``died``      no process holds the lock, and the last launch has no end: killed, or power lost
``ended``     no process holds the lock; an older version that kept no record of its launches
``unknown``   the file system has no locks, and the process is on another machine
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ...recipe.files import RUN_RECIPE
from ...storage import files
from ...storage.folder_lock import is_held
from ...terminal_text import plain
from ...training.callbacks.launches import HEARTBEAT, NAME, is_alive
from ...training.callbacks.training_process import LOG
from .run_folders import LOCK, METRICS, RESULTS

TAIL = 1 << 18  # bytes of launches.jsonl that are enough for its last launch
MAX_SMALL = 1 << 20
_LOG_TAIL = 1 << 14  # bytes of a log that are enough for its last line
_MAX_REASON = 300  # characters
_BY_PROCESS = {  # without locks, by whether its process is alive
    None: ("unknown", "no_locks"),
    True: ("running", "process"),
    False: ("died", "no_process"),
}


@dataclass(frozen=True)
class RunState:
    """The state, its evidence (a key that the browser translates), and what is known besides."""

    name: str
    evidence: str
    launch: Mapping[str, object] | None = None  # the begin of the last launch
    end: Mapping[str, object] | None = None  # its end
    heartbeat: Mapping[str, object] | None = None
    process: Mapping[str, object] | None = None  # of a run that is running, if it is known


def state_of(folder: Path) -> RunState:
    """The state of the run in ``folder``."""
    found = last_launch(folder)
    heartbeat = small_json(folder / HEARTBEAT)
    name, evidence = _starting(folder, found) or _judged(folder, found, heartbeat)
    process = found.start if evidence == "starting" else found.launch or heartbeat
    return RunState(name, evidence, found.launch, found.end, heartbeat, process)


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


@dataclass(frozen=True)
class LastLaunch:
    """What the records of launches end with."""

    launch: Mapping[str, object] | None = None  # the begin of the last one
    end: Mapping[str, object] | None = None  # its end
    start: Mapping[str, object] | None = None  # a process that was to begin another one


def last_launch(folder: Path) -> LastLaunch:
    """The last launch, as far as it is written."""
    found = LastLaunch()
    for line in tail(folder / NAME, TAIL).splitlines():
        row = parsed(line) or {}
        if row.get("event") == "start":
            found = replace(found, start=row)
        elif row.get("event") == "launch":
            found = LastLaunch(launch=row)
        elif row.get("event") == "end":
            found = replace(found, end=row)
    return found


def small_json(path: Path, limit: int = MAX_SMALL) -> Mapping[str, object] | None:
    """The object in a small file; None if it is missing or half-written."""
    try:
        return parsed(files.read_inside(path.parent, path.name, limit))
    except OSError:
        return None


def parsed(line: bytes) -> dict[str, object] | None:
    """The object in a line, fit to be shown; None if it is no JSON object."""
    try:
        found = plain(files.parse_json(line))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def tail(path: Path, length: int) -> bytes:
    """The last whole lines of a file, at most ``length`` bytes; nothing if it cannot be read."""
    try:
        with files.open_inside(path.parent, path.name) as file:
            start = max(0, file.size - length)
            data = file.read(start, file.size - start)
    except OSError:
        return b""
    return data.partition(b"\n")[2] if start else data


def _starting(folder: Path, found: LastLaunch) -> tuple[str, str] | None:
    """The state of a run whose process was started by a board, and has not begun to train."""
    if found.start is None or is_locked(folder):
        return None
    if is_alive(found.start):
        return "running", "starting"
    return ("failed", "not_begun") if found.launch is None else None


def _judged(
    folder: Path, found: LastLaunch, heartbeat: Mapping[str, object] | None
) -> tuple[str, str]:
    launch, end = found.launch, found.end
    locked = is_locked(folder)
    if locked:
        return "running", "lock"
    if end is not None:
        return _ended(end), "end"
    if locked is None and (launch or heartbeat):
        return _BY_PROCESS[is_alive(heartbeat or launch or {})]
    if launch is not None:
        return "died", "no_end"
    if small_json(folder / RESULTS) is not None and _is_newest(folder):
        return "complete", "results"
    return "ended", "no_record"


def _is_newest(folder: Path) -> bool:
    """Whether the results were written after the last metrics."""
    try:
        return (folder / RESULTS).stat().st_mtime >= (folder / METRICS).stat().st_mtime
    except OSError:
        return False


def _ended(end: Mapping[str, object]) -> str:
    """The state of a run whose last launch has this end."""
    outcome = end.get("outcome")
    return str(outcome) if outcome in ("complete", "stopped", "failed") else "ended"
