"""A sweep for a browser: its files, and the state of the trials that have not ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..storage.folder_lock import is_held
from .run_folders import SWEEP, is_run, name_of
from .run_state import small_json
from .run_summary import Summaries

RESULTS, BEST, LOCK = "results.json", "best.yaml", ".sweep.lock"
_MAX_BYTES = 32 << 20
_MAX_TRIALS = 2000  # that a page shows
HALF_RUN = "half-run"


def sweep_row(root: Path, folder: Path) -> dict[str, object]:
    """One sweep in a list."""
    spec, results = small_json(folder / SWEEP, _MAX_BYTES), small_json(folder / RESULTS, _MAX_BYTES)
    trials = _mappings(results, "trials")
    states = [str(one.get("state")) for one in trials]
    number = (results or {}).get("best")
    best = next((one for one in trials if one.get("number") == number), None)
    return {
        "sweep": name_of(root, folder),
        **_state(folder, results, states),
        "objective": _mapping(spec, "objective"),
        "keys": [key.get("key") for key in _mappings(spec, "keys")],
        "requested": (results or {}).get("requested"),
        "counts": {name: states.count(name) for name in dict.fromkeys(states)},
        "best": best.get("value") if best else None,
        "problem": _problem(spec, results),
    }


def sweep_details(root: Path, summaries: Summaries, folder: Path) -> dict[str, object]:
    """One sweep with all its trials."""
    spec, results = small_json(folder / SWEEP, _MAX_BYTES), small_json(folder / RESULTS, _MAX_BYTES)
    trials = _mappings(results, "trials")
    return {
        "row": sweep_row(root, folder),
        "keys": _mappings(spec, "keys"),
        "sampler": (spec or {}).get("sampler"),
        "pruner": (spec or {}).get("pruner"),
        "best": (results or {}).get("best"),
        "best_file": name_of(root, folder / BEST) if (folder / BEST).is_file() else None,
        "importance": _mapping(results, "importance"),
        "remarks": (results or {}).get("remarks") or [],
        "trials": [_trial(root, summaries, folder, one) for one in trials[:_MAX_TRIALS]],
        "is_cut": len(trials) > _MAX_TRIALS,
    }


def _trial(
    root: Path, summaries: Summaries, folder: Path, trial: Mapping[str, object]
) -> dict[str, object]:
    """A trial; of one that has not ended, what its run says now."""
    found = {name: value for name, value in trial.items() if name != "reports"}
    run = folder / str(trial.get("folder", ""))
    if run.parent != folder or not run.is_dir() or not is_run(run):
        return found | {"run": None}
    found["run"] = name_of(root, run)
    if trial.get("state") == HALF_RUN:
        row = summaries.of(run)
        found["live"] = {name: row[name] for name in ("state", "step", "max_steps", "evidence")}
    return found


def _state(
    folder: Path, results: Mapping[str, object] | None, states: list[str]
) -> dict[str, object]:
    """Whether the sweep runs, and the evidence for it."""
    if is_held(folder / LOCK):
        return {"state": "running", "evidence": "sweep_lock"}
    requested = (results or {}).get("requested")
    is_full = isinstance(requested, int) and len(states) >= requested
    if results is not None and HALF_RUN not in states and (is_full or results.get("exhausted")):
        return {"state": "complete", "evidence": "sweep_done"}
    return {"state": "ended", "evidence": "sweep_left"}


def _problem(spec: Mapping[str, object] | None, results: Mapping[str, object] | None) -> str | None:
    missing = SWEEP if spec is None else RESULTS if results is None else None
    return None if missing is None else f"{missing}: is missing or cannot be read"


def _mappings(found: Mapping[str, object] | None, name: str) -> list[dict[str, object]]:
    items = (found or {}).get(name)
    return [one for one in items if isinstance(one, dict)] if isinstance(items, list) else []


def _mapping(found: Mapping[str, object] | None, name: str) -> dict[str, object]:
    inner = (found or {}).get(name)
    return inner if isinstance(inner, dict) else {}
