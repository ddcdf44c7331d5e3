"""Measure a recipe in a new process: its memory is its own, and so is its end."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ... import errors
from ...recipe.recipe import Recipe, dump
from ...storage.child import Child
from .result import BenchResult


@dataclass(frozen=True)
class TrialFailure:
    """Why a trial failed."""

    reason: str
    error: str | None = None  # the class of ``errors`` that ``surefoot train`` would raise

    def raised(self) -> errors.SurefootError:
        """The same as an error to raise."""
        kind: type[errors.SurefootError] = getattr(errors, self.error or "RunError")
        return kind(self.reason)


def measured(
    recipe: Recipe, steps: int, timeout: float | None = None
) -> BenchResult | TrialFailure:
    """The result of ``recipe``, or why it failed; ``timeout`` in seconds. Nothing of it remains
    except the cache of encoded datasets."""
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-") as name:
        folder = Path(name)
        (folder / "recipe.yaml").write_text(dump(recipe), encoding="utf-8")
        files = (folder / "recipe.yaml", steps, folder / "result.json")
        child = Child(
            ["-m", "surefoot.use.bench.trial", *map(str, files)], log=folder / "log", patience=0
        )
        try:
            code = child.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return TrialFailure(f"not done after {timeout:.0f} s")
        finally:
            child.end()
        if code:
            return _crash(child, (folder / "log").read_text(errors="replace"))
        return _result(json.loads((folder / "result.json").read_text()))


def _result(found: Mapping[str, object]) -> BenchResult | TrialFailure:
    figures = found.get("figures")
    if isinstance(figures, dict):
        return BenchResult(**figures)
    error = found.get("error")
    return TrialFailure(str(found["failure"]), None if error is None else str(error))


def _crash(child: Child, log: str) -> TrialFailure:
    if child.killed_by == "SIGKILL":
        return TrialFailure("killed by the system, most likely because memory is short")
    lines = [line for line in log.splitlines() if line.strip()]
    if child.killed_by is None and lines:
        return TrialFailure(lines[-1])
    return TrialFailure(f"ended {child.ending}")
