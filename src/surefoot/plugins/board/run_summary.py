"""One row of the table of runs: state, step, loss, metric, speed, time left, size."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import RecipeError, SurefootError
from ...recipe.files import RUN_RECIPE, read_text
from ...recipe.yaml import parse
from .run_folders import METRICS, RESULTS
from .run_state import RunState, has_begun, parsed, small_json, state_of, tail, why_not_begun

_TAIL = 1 << 16  # bytes of metrics.jsonl that hold the last log and the last evaluation
_SIZE_SECONDS = 20.0  # for which a size is not measured again
_STALLED = 600.0  # seconds without a step


_UNREAD: dict[str, object] = {
    **dict.fromkeys(("model", "stage", "method"), ""),
    **dict.fromkeys(("begins_with", "configured_steps")),
    "best_metric": "eval_loss",
}


@dataclass
class Summaries:
    """Rows of runs, with sizes that are measured now and then."""

    root: Path
    _sizes: dict[Path, tuple[float, object, int]] = field(default_factory=dict)
    _facts: dict[Path, tuple[object, dict[str, object]]] = field(default_factory=dict)

    def of(self, folder: Path, *, is_quick: bool = False) -> dict[str, object]:
        """The row of a run. If it ``is_quick``, without what its recipe says and its size, which
        cost 40 times the rest, unless these were read before."""
        state = state_of(folder)
        train, evaluation, is_broken = last_rows(folder)
        step, most = _progress(folder, state, train)
        facts = self._facts_of(folder, is_quick=is_quick)
        return {
            "run": folder.relative_to(self.root).as_posix(),
            "name": folder.name if folder != self.root else self.root.name,
            **state_facts(state),
            "has_begun": (is_begun := has_begun(folder)),
            "reason": None if is_begun or state.name == "running" else why_not_begun(folder, state),
            "step": step,
            "max_steps": most,
            "loss": _number(train.get("loss")),
            "metric": _metric(evaluation, facts),
            "speed": _number(train.get("tokens_per_second")),
            "seconds_left": _seconds_left(state, step, most),
            "size": self._sizes.get(folder, (0, 0, None))[2]
            if is_quick
            else self.size(folder, is_live=state.name == "running"),
            "changed": _changed(folder),
            "broken_metrics": is_broken,
            **facts,
            "begins_with": self._below(facts.get("begins_with")),
            **({} if is_begun else {"recipe_problem": None}),
        }

    def _below(self, path: object) -> str | None:
        """A path as it is named from ROOT, if it is below."""
        if not isinstance(path, str):
            return None
        return path.removeprefix(f"{self.root}/")

    def _facts_of(self, folder: Path, *, is_quick: bool) -> dict[str, object]:
        """What the recipe says; read again if it was replaced."""
        stamp, known = _stamp(folder / RUN_RECIPE), self._facts.get(folder)
        if known is None or known[0] != stamp:
            if is_quick:
                return _UNREAD
            known = self._facts[folder] = stamp, recipe_facts(folder)
        return known[1]

    def size(self, folder: Path, *, is_live: bool = False) -> int:
        """Bytes on the disk; a file with several names counts once."""
        known = self._sizes.get(folder)
        age = _SIZE_SECONDS if is_live else 10 * _SIZE_SECONDS
        stamp = None if is_live else _stamp(folder)  # a live run changes all the time
        if known is None or known[1] != stamp or time.monotonic() - known[0] > age:
            known = self._sizes[folder] = time.monotonic(), stamp, disk_size(folder)
        return known[2]


def state_facts(state: RunState) -> dict[str, object]:
    """The state for a browser."""
    beat = state.heartbeat or {}
    since = _number(beat.get("time"))
    silent = None if since is None else max(0.0, time.time() - since)
    return {
        "state": state.name,
        "evidence": state.evidence,
        "launch": state.launch,
        "end": state.end,
        "silent_seconds": silent,
        "is_stalled": state.name == "running" and silent is not None and silent > _STALLED,
    }


def last_rows(folder: Path) -> tuple[dict[str, object], dict[str, object], bool]:
    """The last log and the last evaluation, and whether a line among them or after is broken."""
    train: dict[str, object] = {}
    evaluation: dict[str, object] = {}
    is_broken = False
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


def recipe_facts(folder: Path) -> dict[str, object]:
    """What the recipe of a run says, as far as it can be read."""
    try:
        data = parse(read_text(folder / RUN_RECIPE, follow=False), RUN_RECIPE).data
    except (RecipeError, OSError) as error:
        return {"recipe_problem": str(error)}
    except SurefootError as error:
        return {"recipe_problem": str(error)}
    sections = data if isinstance(data, dict) else {}
    model, train = sections.get("model"), sections.get("train")
    checkpoint = sections.get("checkpoint")
    resume = checkpoint.get("resume") if isinstance(checkpoint, dict) else None
    model = model if isinstance(model, dict) else {}
    train = train if isinstance(train, dict) else {}
    path = str(model.get("path", ""))
    return {
        "model": path.rstrip("/").rpartition("/")[2],
        "stage": _variant(sections.get("stage")),
        "method": _variant(sections.get("method")) or "full",
        "best_metric": str(train.get("metric_for_best_model") or "eval_loss"),
        "begins_with": resume if isinstance(resume, str) and "checkpoint-" in resume else None,
        "configured_steps": train.get("max_steps"),
    }


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Another one if a file was replaced; of a folder, if a checkpoint or a file came or went."""
    try:
        stat = path.lstat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def disk_size(folder: Path) -> int:
    """Bytes that a folder needs on the disk."""
    total, seen = 0, set()
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                stat = os.lstat(os.path.join(where, name))  # noqa: PTH118 - thousands of files
            except OSError:  # deleted at this moment
                continue
            if stat.st_nlink > 1:
                if (stat.st_dev, stat.st_ino) in seen:
                    continue
                seen.add((stat.st_dev, stat.st_ino))
            total += stat.st_blocks * 512
    return total


def _variant(value: object) -> str:
    if isinstance(value, Mapping):
        return str(next(iter(value), ""))
    return str(value or "")


def _progress(
    folder: Path, state: RunState, train: Mapping[str, object]
) -> tuple[int | None, int | None]:
    beat, results = state.heartbeat or {}, small_json(folder / RESULTS) or {}
    known = [beat.get("step"), train.get("step")]
    if state.name == "complete":
        known.append(results.get("global_step"))
    steps = [value for value in known if type(value) is int]
    most = beat.get("max_steps")
    if type(most) is not int:
        most = results.get("global_step") if state.name == "complete" else None
    return max(steps, default=None), most if type(most) is int else None


def _metric(evaluation: Mapping[str, object], facts: Mapping[str, object]) -> dict[str, object]:
    name = str(facts.get("best_metric", "eval_loss"))
    return {"name": name, "value": _number(evaluation.get(name))}


def _seconds_left(state: RunState, step: int | None, most: int | None) -> float | None:
    """By the speed of this launch: earlier ones may have run elsewhere."""
    beat = state.heartbeat or {}
    if state.name != "running" or step is None or most is None:
        return None
    began, now, first = (_number(beat.get(name)) for name in ("since", "time", "first_step"))
    if began is None or now is None or first is None or step <= first:
        return None
    return (now - began) / (step - first) * max(0, most - step)


def _changed(folder: Path) -> float | None:
    """When a file of the run last changed, in seconds since 1970."""
    times = []
    for name in (METRICS, RUN_RECIPE, "launches.jsonl", ".heartbeat.json"):
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)


def _number(value: object) -> float | None:
    if type(value) is int:
        return value
    return value if isinstance(value, float) and math.isfinite(value) else None
