"""Measure a recipe in a new process: its memory is its own, and so is its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ... import errors
from ...parallel.launch_environment import LAUNCHER
from ...recipe.recipe import Recipe, dump
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
        command = [sys.executable, "-P", "-m", "surefoot.use.bench.trial", *map(str, files)]
        with (folder / "log").open("w") as log:
            try:
                code = subprocess.run(
                    command,
                    env={**os.environ, LAUNCHER: str(os.getpid())},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    timeout=timeout,
                    start_new_session=True,  # Ctrl-C ends this process, which ends that one
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                return TrialFailure(f"not done after {timeout:.0f} s")
        if code:
            return _crash(code, (folder / "log").read_text(errors="replace"))
        return _result(json.loads((folder / "result.json").read_text()))


def _result(found: Mapping[str, object]) -> BenchResult | TrialFailure:
    figures = found.get("figures")
    if isinstance(figures, dict):
        return BenchResult(**figures)
    error = found.get("error")
    return TrialFailure(str(found["failure"]), None if error is None else str(error))


def _crash(code: int, log: str) -> TrialFailure:
    if code == -signal.SIGKILL:
        return TrialFailure("killed by the system, most likely because memory is short")
    if code < 0:
        return TrialFailure(f"ended by {signal.Signals(-code).name}")
    lines = [line for line in log.splitlines() if line.strip()]
    return TrialFailure(lines[-1] if lines else f"ended with code {code}")
