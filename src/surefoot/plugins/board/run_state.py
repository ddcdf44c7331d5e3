"""State of a run, from evidence: its lock, its launches, its results. Never a guess.

``running``   a process holds the lock of the folder; without locks, or before it trains, is alive
``complete``  the last launch ended after the last step
``stopped``   a signal stopped it; it has saved, and can be resumed
``failed``    it ended with an error, which is known, or before it trained
``died``      no process holds the lock, and the last launch has no end: killed, or power lost
``ended``     no process holds the lock, and there is no record of its launches
``unknown``   the file system has no locks, and the process is on another machine
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...recipe.files import RUN_RECIPE
from ...storage import files
from ...storage.folder_lock import is_held
from ...terminal_text import plain
from ...training.callbacks.launches import HEARTBEAT, NAME, is_alive
from ...training.callbacks.training_process import LOG
from .run_folders import LOCK, METRICS

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
    last: dict[object, Mapping[str, object]] = {}  # by event: what the records end with
    for line in tail(folder / NAME, TAIL).splitlines():
        row = parsed(line) or {}
        if row.get("event") == "launch":
            last = {}
        last[row.get("event")] = row
    start, launch, end = (last.get(event) for event in ("start", "launch", "end"))
    try:
        heartbeat = parsed(files.read_inside(folder, HEARTBEAT, MAX_SMALL))
    except OSError:
        heartbeat = None
    locked = is_locked(folder)
    process = launch or heartbeat
    if locked:
        name, evidence = "running", "lock"
    elif start is not None and is_alive(start):
        name, evidence, process = "running", "starting", start
    elif start is not None and launch is None:
        name, evidence = "failed", "not_begun"
    elif end is not None:
        outcome = end.get("outcome")
        known = outcome in ("complete", "stopped", "failed")
        name, evidence = str(outcome) if known else "ended", "end"
    elif locked is None and process is not None:
        name, evidence = _BY_PROCESS[is_alive(heartbeat or process)]
    elif launch is not None:
        name, evidence = "died", "no_end"
    else:
        name, evidence = "ended", "no_record"
    return RunState(name, evidence, launch, end, heartbeat, process)


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
