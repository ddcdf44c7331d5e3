"""Runs below a folder as plain data: the table, one run, its curves, its samples, and how two
recipes differ. It reads files, and caches what it has read; no restart needs the caches."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...checkpoint.looking.listing import added, stored
from ...errors import RecipeError, RunError
from ...recipe.comparison import changes
from ...recipe.files import RUN_RECIPE, read_text
from ...recipe.recipe import load_text
from ...run.goodput import ledger_of
from ...storage.files import open_inside, size_of
from ...training.callbacks.launches import LOG
from ...training.callbacks.launches import NAME as LAUNCHES
from .metrics import Column, MetricsFile, smoothed, thinned
from .processes import ChildCommands, Conversations
from .run_folders import METRICS, find_runs, run_inside
from .run_state import Summaries, parsed, tail

MAX_NAMES = 40  # of curves in one request
MAX_SAMPLE_BYTES = 8 << 20
MAX_SAMPLES = 64
_MAX_FILES = 24  # of metrics in memory: of the runs that were looked at last
_MAX_LAUNCH_BYTES = 8 << 20
_MAX_LAUNCHES = 200
_MAX_LOG = 1 << 17
_MAX_TOKENS = 2000  # of a sampled response
_SEARCHED = ("run", "state", "model", "stage", "method")
_MACHINE = ("peak_memory", "save_blocking_seconds")
_SAMPLES = re.compile(r"(rollouts|generations)-((?:checkpoint-)?(\d+)|[\w.-]+)\.jsonl")


@dataclass
class Board:
    """Runs below ``root``, an absolute path without symbolic links."""

    root: Path
    is_read_only: bool = False
    folders: Sequence[Path] | None = None  # besides root, what recipes may name; None: anything
    summaries: Summaries = field(init=False)
    commands: ChildCommands = field(init=False)
    conversations: Conversations = field(init=False)
    _metrics: Callable[[Path], MetricsFile] = field(
        default_factory=lambda: lru_cache(_MAX_FILES)(MetricsFile)
    )

    def __post_init__(self) -> None:
        self.summaries = Summaries(self.root)
        self.commands = ChildCommands(self.root)
        self.conversations = Conversations(self.root)

    def facts(self) -> dict[str, object]:
        """What each page shows of the board itself."""
        return {"root": str(self.root), "is_read_only": self.is_read_only}

    def table(self) -> dict[str, Any]:
        """All runs: those that trained first, the latest at the top."""
        self.commands.reap()
        found_runs = find_runs(self.root)
        rows = [self.summaries.of(folder) for folder in found_runs.folders if folder.exists()]
        rows.sort(key=lambda row: (not row["step"], -(row["changed"] or 0.0), row["run"]))
        return {**self.facts(), "runs": rows, "is_cut": found_runs.is_cut}

    def details(self, run: str) -> dict[str, Any]:
        """One run: its row, recipe, launches, files, and bytes on the disk."""
        folder = run_inside(self.root, run)
        metrics = self.metrics(folder)
        try:
            recipe, problem = read_text(folder / RUN_RECIPE, follow=False), None
        except RecipeError as error:
            recipe, problem = "", str(error)
        return {
            "row": self.summaries.of(folder),
            "folder": str(folder),
            "size": added([stored(folder)])[0],
            "recipe": recipe,
            "recipe_problem": problem,
            "launches": _launches(folder),
            "goodput": _goodput(folder),
            "metrics": sorted(metrics.columns),
            "metrics_problem": metrics.note(),
            "samples": sample_files(folder),
            "has_log": (folder / LOG).is_file(),
        }

    def metrics(self, folder: Path) -> MetricsFile:
        """The metrics of a run, as they are now."""
        metrics = self._metrics(folder / METRICS)
        metrics.refresh()
        return metrics

    def series(
        self, run: str, names: Sequence[str], points: int, first: float, last: float, smooth: int
    ) -> dict[str, object]:
        """Curves of a run between two steps, thinned to about ``points``; with ``smooth``, also
        their means over that many logs before and after."""
        folder = run_inside(self.root, run)
        metrics, machine = self.metrics(folder), _of_machine(folder)

        def curve(column: Column) -> dict[str, object]:
            steps, values = thinned(column, points, first, last)
            return {"steps": steps, "values": values, "total": len(column.steps)}

        curves: dict[str, dict[str, object]] = {}
        with metrics.lock:
            for name in names[:MAX_NAMES]:
                column = metrics.columns.get(name) or machine.columns.get(name)
                if column is not None:
                    curves[name] = curve(column)
                    if smooth and len(column.steps) > 2:
                        curves[name]["smooth"] = curve(smoothed(column, smooth))
        return {"series": curves, "problem": metrics.note()}

    def log(self, run: str) -> dict[str, object]:
        """The end of the log of a run that a board started."""
        path = run_inside(self.root, run) / LOG
        return {"text": tail(path, _MAX_LOG).decode(errors="replace"), "is_there": path.is_file()}

    def refusal(self, data: object, base: Path) -> str | None:
        """Why a recipe, or a text of one, names a file that this board does not open; ``base`` is
        the folder that its paths are relative to, besides ROOT."""
        if self.folders is None:
            return None
        allowed_folders = (self.root, *self.folders)
        for text in _texts(data):
            is_file = text.startswith("file:")
            if "://" in text and not is_file:
                continue
            # fsspec opens these as files, with any number of slashes.
            path = re.sub("^file:/*", "/", text) if is_file else os.path.expanduser(text)  # noqa: PTH111
            for start in {base, self.root}:
                # With links followed: one below ROOT may lead out of it.
                resolved = Path(os.path.realpath(start / path))
                if not any(resolved.is_relative_to(folder) for folder in allowed_folders):
                    return (
                        f"{text[:200]!r} is outside of {self.root}; start the board with "
                        "--folder PATH to let recipes name models and datasets in another folder"
                    )
        return None

    async def close(self) -> None:
        """End what belongs to the board; training does not."""
        await self.commands.close()
        await self.conversations.close()


def _texts(data: object) -> Iterator[str]:
    """All texts in a recipe that may be paths."""
    if isinstance(data, Mapping | list):
        for value in data.values() if isinstance(data, Mapping) else data:
            yield from _texts(value)
    # Longer than any path of Linux, or no path at all.
    elif isinstance(data, str) and len(data) < 4096 and "\n" not in data and "\0" not in data:
        yield data


def matches(row: Mapping[str, Any], words: str) -> bool:
    """Whether a row of the table has all of these words: in its name, state or recipe."""
    text = " ".join(str(row.get(name, "")) for name in _SEARCHED).lower()
    return all(word in text for word in words.lower().split())


def differences(old_run: Path, new_run: Path) -> list[Mapping[str, object]]:
    """The settings that differ between the recipes of two runs. Raises ``SurefootError``."""
    old, new = (
        load_text(read_text(run / RUN_RECIPE, follow=False), str(run / RUN_RECIPE), run)
        for run in (old_run, new_run)
    )
    return [{"path": c.path, "old": c.old, "new": c.new} for c in changes(old, new)]


def _events(folder: Path) -> list[dict[str, Any]]:
    lines = tail(folder / LAUNCHES, _MAX_LAUNCH_BYTES).splitlines()
    return [row for line in lines if (row := parsed(line)) is not None]


def _launches(folder: Path) -> list[dict[str, Any]]:
    """Each launch with its end, if it has one, and the ranks that others have waited for."""
    launches: list[dict[str, Any]] = []
    for row in _events(folder):
        if row.get("event") == "launch":
            launches.append({"begin": row, "end": None, "slow_ranks": []})
        elif row.get("event") == "end" and launches:
            launches[-1]["end"] = row
        elif row.get("event") == "slow_rank" and launches:
            launches[-1]["slow_ranks"].append(row)
    return launches[-_MAX_LAUNCHES:]


def _goodput(folder: Path) -> dict[str, Any] | None:
    """Where the time of a run went; None if there is no record of it, or more than a page may take
    to read."""
    if (size_of(folder / LAUNCHES) or 0) > _MAX_LAUNCH_BYTES:
        return None
    try:
        return ledger_of(folder).as_data()
    except RunError:
        return None


def _of_machine(folder: Path) -> MetricsFile:
    """Memory, and time lost to saves over all launches, by step."""
    metrics, before, last = MetricsFile(folder / LAUNCHES), 0.0, 0.0
    for row in _events(folder):
        if row.get("event") == "launch":
            # Each launch counts its own from 0.
            before, last = before + last, 0.0
        if row.get("event") != "log" or type(row.get("step")) is not int:
            continue
        spent = row.get("save_blocking_seconds")
        if isinstance(spent, int | float):
            last = float(spent)
            row["save_blocking_seconds"] = before + last
        metrics.put_row({name: row[name] for name in ("step", *_MACHINE) if name in row})
    return metrics


def sample_files(folder: Path) -> list[dict[str, Any]]:
    """What a run has generated, in the order of steps, which are None if the name does not say one:
    ``rollouts`` are sampled by evaluations, ``generations`` by `surefoot eval`."""
    matches = [match for path in folder.iterdir() if (match := _SAMPLES.fullmatch(path.name))]
    sampled = [
        {"name": m[0], "kind": m[1], "label": m[2], "step": int(m[3]) if m[3] else None}
        for m in matches
    ]
    return sorted(sampled, key=lambda s: (s["step"] is None, s["step"] or 0, s["name"]))


def read_samples(folder: Path, name: str) -> dict[str, object]:
    """The first rows of a file without what no page shows, and how many lines are no rows."""
    # Only what is listed: a page may send any text as a name.
    if name not in {sample["name"] for sample in sample_files(folder)}:
        return {"rows": [], "broken": 0}
    with open_inside(folder, name) as file:
        is_cut = file.size > MAX_SAMPLE_BYTES
        lines = file.read_up_to(0, MAX_SAMPLE_BYTES).split(b"\n")
    rest = lines.pop()
    rows = [row for line in lines[:MAX_SAMPLES] if (row := parsed(line)) is not None]
    broken = len(lines[:MAX_SAMPLES]) - len(rows) + bool(rest and not is_cut)
    for row in rows:
        row.pop("prompt_ids", None)
        if isinstance(tokens := row.get("tokens"), list):
            row["tokens"] = tokens[:_MAX_TOKENS]
    return {"rows": rows, "broken": broken}
