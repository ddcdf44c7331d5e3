"""What is known of the runs that a terminal watches, read from their files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...callbacks.launches import NAME as LAUNCHES
from ...checkpoint.disk.commit import committed, step_of
from ...errors import RunError, SurefootError, counted
from ...storage.address import Address, default_cache, is_address
from ..metrics.metrics_file import MetricsFile
from ..metrics.thinning import thinned
from ..run_folders import METRICS, find_runs, is_run
from ..run_state import parsed, tail
from ..run_summary import Summaries, last_rows
from .curves import Curve

MOST = 8  # runs, as there are colors
_POINTS = 2000
_TAIL = 1 << 14
EVIDENCE = {  # keys of RunState.evidence in words
    "lock": "a process holds its lock",
    "process": "its process is alive",
    "starting": "its process has not begun to train",
    "not_begun": "its process ended before it began to train",
    "no_locks": "the file system has no locks, and the process is on another machine",
    "no_process": "its process is gone",
    "end": "it has recorded its end",
    "no_end": "no process holds its lock, and it has recorded no end",
    "results": "it has written its results",
    "no_record": "it is of a version that kept no record",
}


@dataclass
class WatchedRun:
    """The files of one run."""

    folder: Path
    metrics: MetricsFile = field(init=False)
    summaries: Summaries = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = MetricsFile(self.folder / METRICS)
        self.summaries = Summaries(self.folder.parent)

    def look(self) -> dict[str, object]:
        """The row of the board's table with the last figures and checkpoints. A run that vanishes
        is gone."""
        if not self.folder.exists():
            return {"name": self.folder.name, "state": "gone", "evidence": "", "folder": ""}
        self.metrics.refresh()
        row = self.summaries.of(self.folder)
        train, evaluation, _ = last_rows(self.folder)
        row |= {"folder": str(self.folder), "because": self._because(row)}
        for name in ("learning_rate", "grad_norm"):
            row[name] = _finite(train.get(name))
        row["eval_loss"] = _finite(evaluation.get("eval_loss"))
        row["peak_memory"] = self._memory()
        row["checkpoints"] = self._checkpoints()
        row["metrics_problem"] = self.metrics.note()
        return row

    def curve(self, name: str) -> Curve | None:
        """The curve of a metric, if there is one."""
        column = self.metrics.columns.get(name)
        return None if column is None else Curve(*thinned(column, _POINTS))

    def _because(self, row: dict[str, object]) -> str:
        end = row.get("end")
        if row["state"] == "failed" and isinstance(end, dict) and end.get("error"):
            return str(end["error"])
        if row["state"] == "stopped" and isinstance(end, dict) and end.get("signal"):
            return f"by {end['signal']}; it can be resumed"
        if row.get("is_stalled"):
            seconds = row.get("silent_seconds")
            minutes = int(seconds // 60) if isinstance(seconds, float) else 0
            return f"no step for {counted(minutes, 'minute')}"
        return EVIDENCE.get(str(row["evidence"]), str(row["evidence"]))

    def _memory(self) -> int | None:
        for line in reversed(tail(self.folder / LAUNCHES, _TAIL).splitlines()):
            found = (parsed(line) or {}).get("peak_memory")
            if isinstance(found, int):
                return found
        return None

    def _checkpoints(self) -> list[int]:
        try:
            return [step_of(path) for path in committed(self.folder)]
        except SurefootError:  # the folder vanished
            return []


def found_runs(places: Sequence[str]) -> tuple[list[WatchedRun], str | None]:
    """The runs that are in or below ``places``, and a note if there are more than there are
    colors. Raises ``RunError`` if there is none."""
    folders: list[Path] = []
    for place in places:
        path = default_cache() / Address(place).slug if is_address(place) else Path(place)
        path = path.absolute()
        if not path.is_dir():
            raise RunError(f"{place}: no such folder; name the folder of a run, or one above runs")
        below = [path] if is_run(path) else find_runs(path).folders
        if not below:
            raise RunError(f"{place}: there is no run in it")
        folders += [folder for folder in below if folder not in folders]
    if len(folders) <= MOST:
        return [WatchedRun(folder) for folder in folders], None
    newest = sorted(folders, key=_changed, reverse=True)[:MOST]
    note = (
        f"the {MOST} of {counted(len(folders), 'run')} that changed last; `surefoot board` has all"
    )
    return [WatchedRun(folder) for folder in folders if folder in newest], note


def _changed(folder: Path) -> float:
    times = [0.0]
    for name in (METRICS, LAUNCHES):
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times)


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
