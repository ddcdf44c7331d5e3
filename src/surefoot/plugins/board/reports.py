"""Runs as plain data: the table, one run, its curves, and how two recipes differ."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...errors import RecipeError
from ...recipe.files import RUN_RECIPE, read_text
from ...recipe.recipe import changes, load_text
from ...training.callbacks.launches import NAME as LAUNCHES
from ...training.callbacks.training_process import LOG
from .board import Board
from .curves import Column, smoothed, thinned
from .metrics import MetricsFile
from .run_folders import find_runs, run_inside
from .run_state import parsed, tail
from .samples import sample_files

MAX_NAMES = 40
_SEARCHED = ("run", "state", "model", "stage", "method")
_MAX_LAUNCH_BYTES = 8 << 20
_MAX_LAUNCHES = 200
_MAX_LOG = 1 << 17
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


def details(board: Board, run: str) -> dict[str, object]:
    """One run: its row, recipe, launches and files."""
    folder = run_inside(board.root, run)
    metrics = board.metrics(folder)
    try:
        recipe, problem = read_text(folder / RUN_RECIPE, follow=False), None
    except RecipeError as error:
        recipe, problem = "", str(error)
    return {
        "row": board.summaries.of(folder),
        "folder": str(folder),
        "recipe": recipe,
        "recipe_problem": problem,
        "launches": _launches(folder),
        "metrics": sorted(metrics.columns),
        "metrics_problem": metrics.note(),
        "samples": [asdict(one) for one in sample_files(folder)],
        "has_log": (folder / LOG).is_file(),
    }


def series(
    board: Board,
    run: str,
    names: Sequence[str],
    points: int,
    first: float,
    last: float,
    smooth: int,
) -> dict[str, object]:
    """Curves of a run between two steps, thinned to about ``points``; with ``smooth``, also their
    means over that many logs before and after."""
    folder = run_inside(board.root, run)
    metrics, machine = board.metrics(folder), _of_machine(folder)

    def curve(column: Column) -> dict[str, object]:
        steps, values = thinned(column, points, first, last)
        return {"steps": steps, "values": values, "total": len(column.steps)}

    found: dict[str, dict[str, object]] = {}
    with metrics.lock:
        for name in names[:MAX_NAMES]:
            column = metrics.columns.get(name) or machine.columns.get(name)
            if column is not None:
                found[name] = curve(column)
                if smooth and len(column.steps) > 2:
                    found[name]["smooth"] = curve(smoothed(column, smooth))
    return {"series": found, "problem": metrics.note()}


def log(board: Board, run: str) -> dict[str, object]:
    """The end of the log of a run that a board started."""
    path = run_inside(board.root, run) / LOG
    return {"text": tail(path, _MAX_LOG).decode(errors="replace"), "is_there": path.is_file()}


def differences(one: Path, other: Path) -> list[Mapping[str, object]]:
    """The settings that differ between the recipes of two runs. Raises ``SurefootError``."""
    old, new = (
        load_text(read_text(run / RUN_RECIPE, follow=False), str(run / RUN_RECIPE), run)
        for run in (one, other)
    )
    return [{"path": c.path, "old": c.old, "new": c.new} for c in changes(old, new)]


def _events(folder: Path) -> list[dict[str, Any]]:
    lines = tail(folder / LAUNCHES, _MAX_LAUNCH_BYTES).splitlines()
    return [row for line in lines if (row := parsed(line)) is not None]


def _launches(folder: Path) -> list[dict[str, object]]:
    """Each launch with its end, if it has one."""
    found: list[dict[str, object]] = []
    for row in _events(folder):
        if row.get("event") == "launch":
            found.append({"begin": row, "end": None})
        elif row.get("event") == "end" and found:
            found[-1]["end"] = row
    return found[-_MAX_LAUNCHES:]


def _of_machine(folder: Path) -> MetricsFile:
    """Memory, and time lost to saves over all launches, by step."""
    found, before, last = MetricsFile(folder / LAUNCHES), 0.0, 0.0
    for row in _events(folder):
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
