"""Runs as plain data: the table, one run, its curves, log, samples and checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...checkpoint.disk.pins import pin, pinned
from ...checkpoint.looking.listing import list_run
from ...errors import RecipeError, RunError, SurefootError
from ...recipe.files import RUN_RECIPE, read_text
from ...storage import files
from ...storage.folder_lock import lock
from ...training.callbacks.launches import HEARTBEAT
from ...training.callbacks.launches import NAME as LAUNCHES
from ...training.callbacks.training_process import LOG
from ..board import Board
from ..metrics.excerpt import MetricsExcerpt
from ..metrics.metrics_file import MetricsFile
from ..metrics.thinning import Column, smoothed, thinned
from ..recipe_text import differences
from ..run_folders import LOCK, find_runs, name_of, run_inside
from ..run_state import has_begun, parsed, state_of, tail
from ..samples import read_samples, sample_files

MAX_NAMES = 40
_SEARCHED = ("run", "state", "model", "stage", "method")
_MAX_LAUNCH_BYTES = 8 << 20
_MAX_LOG = 1 << 17
_OF_A_START = {LOCK, LOG, LAUNCHES, HEARTBEAT}  # files of a run before it has begun
_MACHINE = ("peak_memory", "save_blocking_seconds")


def table(board: Board, seconds: float = math.inf) -> dict[str, object]:
    """All runs below ROOT: those that trained first, the latest at the top. After ``seconds`` the
    rest is only what is known at once; the next call knows more."""
    board.commands.reap()
    found, deadline = find_runs(board.root), time.monotonic() + seconds
    rows = [
        board.summaries.of(folder, is_quick=time.monotonic() >= deadline)
        for folder in found.folders
        if folder.exists()
    ]
    rows.sort(key=_newest_first)
    return {**board.facts(), "runs": rows, "is_cut": found.is_cut}


def _newest_first(row: Mapping[str, Any]) -> tuple[bool, float, str]:
    return not row["step"], -(row["changed"] or 0.0), row["run"]


def matches(row: Mapping[str, Any], words: str) -> bool:
    """Whether a row of the table has all of these words: in its name, state or recipe."""
    text = " ".join(str(row.get(name, "")) for name in _SEARCHED).lower()
    return all(word in text for word in words.lower().split())


def details(board: Board, run: str, *, may_be_excerpt: bool = False) -> dict[str, object]:
    """One run: its row, recipe, launches and files."""
    folder = run_inside(board.root, run)
    metrics, excerpt = _metrics(board, folder, may_be_excerpt)
    try:
        recipe, problem = read_text(folder / RUN_RECIPE, follow=False), None
    except RecipeError as error:
        recipe, problem = "", str(error)
    return {
        "row": board.summaries.of(folder),
        "folder": str(folder),
        "recipe": recipe,
        "recipe_problem": problem,
        "launches": launches(folder),
        "metrics": sorted(metrics.columns),
        "metrics_problem": metrics.note(),
        "excerpt": excerpt,
        "samples": [asdict(one) for one in sample_files(folder)],
        "has_log": (folder / LOG).is_file(),
    }


def series(
    board: Board,
    run: str,
    names: Sequence[str],
    *,
    points: int = 2000,
    first: float = -math.inf,
    last: float = math.inf,
    smooth: int = 0,
    may_be_excerpt: bool = False,
) -> dict[str, object]:
    """Curves of a run between two steps, thinned to about ``points``; with ``smooth``, also their
    means over that many logs before and after. ``excerpt`` of the answer is not None if they are
    of some lines only, which ``may_be_excerpt`` allows; these are not smoothed."""
    folder = run_inside(board.root, run)
    metrics, excerpt = _metrics(board, folder, may_be_excerpt)
    machine = of_machine(folder)
    found: dict[str, dict[str, object]] = {}
    with metrics.lock:
        for name in names[:MAX_NAMES]:
            column = metrics.columns.get(name) or machine.columns.get(name)
            if column is not None:
                found[name] = _curve(column, points, first, last)
                if smooth and not excerpt and len(column.steps) > 2:
                    found[name]["smooth"] = _curve(smoothed(column, smooth), points, first, last)
    return {"series": found, "problem": metrics.note(), "excerpt": excerpt}


def _metrics(
    board: Board, folder: Path, may_be_excerpt: bool
) -> tuple[MetricsFile, dict[str, object] | None]:
    """The metrics of a run; if they are an excerpt, what is known of it."""
    found = board.metrics_soon(folder) if may_be_excerpt else board.metrics(folder)
    return (found.metrics, found.facts()) if isinstance(found, MetricsExcerpt) else (found, None)


def log(board: Board, run: str) -> dict[str, object]:
    """The end of the log of a run that a board started."""
    path = run_inside(board.root, run) / LOG
    data = tail(path, _MAX_LOG)
    return {"text": data.decode(errors="replace"), "is_there": path.is_file()}


def samples(board: Board, run: str, file: str) -> dict[str, object]:
    """Responses that the run has kept."""
    return read_samples(run_inside(board.root, run), file)


def diff(board: Board, a: str, b: str) -> dict[str, object]:
    """The settings that differ between the recipes of two runs."""
    one, other = (run_inside(board.root, name) for name in (a, b))
    return {
        "a": name_of(board.root, one),
        "b": name_of(board.root, other),
        "changes": differences(one, other),
    }


def checkpoints(board: Board, run: str) -> dict[str, object]:
    """The checkpoints of a run, oldest first."""
    folder = run_inside(board.root, run)
    try:
        lines = [{**asdict(line), "path": line.path.name} for line in list_run(folder)]
        return {"checkpoints": lines, "pinned": sorted(pinned(folder)), "problem": None}
    except (SurefootError, OSError) as error:
        return {"checkpoints": [], "pinned": [], "problem": str(error)}


def set_pin(board: Board, run: str, step: int, *, is_pinned: bool) -> dict[str, object]:
    """Keep a checkpoint whatever the retention policy says, or no longer."""
    folder = run_inside(board.root, run)
    return {"pinned": sorted(pin(folder, step, is_pinned=is_pinned))}


def delete(board: Board, run: str) -> dict[str, object]:
    """Delete the folder of a run that did not begin. Raises ``RunError`` for any other, and if the
    folder has files that a start does not leave."""
    folder = run_inside(board.root, run)
    if has_begun(folder) or state_of(folder).name in ("running", "unknown"):
        raise RunError(f"{run}: has begun or is starting; only a run that did not start is deleted")
    with lock(folder, RunError, doing="cannot delete", taken=f"{run}: a process has just begun it"):
        names = set(files.list_folder(folder))
        if more := sorted(names - _OF_A_START):
            raise RunError(f"{folder}: has {more[0]}, which no start leaves; delete it yourself")
        with files.raising(RunError, f"cannot delete {folder}"):
            for name in names:
                (folder / name).unlink()
            folder.rmdir()
    return {}


def launches(folder: Path) -> list[dict[str, object]]:
    """Each launch with its end, if it has one."""
    found: list[dict[str, object]] = []
    for line in tail(folder / LAUNCHES, _MAX_LAUNCH_BYTES).splitlines():
        row = parsed(line)
        if row is None:
            continue
        if row.get("event") == "launch":
            found.append({"begin": row, "end": None})
        elif row.get("event") == "end" and found:
            found[-1]["end"] = row
    return found[-200:]


def of_machine(folder: Path) -> MetricsFile:
    """Memory, and time lost to saves over all launches, by step."""
    found, before, last = MetricsFile(folder / LAUNCHES), 0.0, 0.0
    for line in tail(folder / LAUNCHES, _MAX_LAUNCH_BYTES).splitlines():
        row = parsed(line) or {}
        if row.get("event") == "launch":
            before, last = before + last, 0.0
        if row.get("event") != "log" or type(row.get("step")) is not int:
            continue
        spent = row.get("save_blocking_seconds")
        if isinstance(spent, int | float):
            last = float(spent)
            row["save_blocking_seconds"] = before + last
        found.put_row({name: row[name] for name in ("step", *_MACHINE) if name in row})
    return found


def _curve(column: Column, points: int, first: float, last: float) -> dict[str, object]:
    steps, values = thinned(column, points, first, last)
    return {"steps": steps, "values": values, "total": len(column.steps)}
