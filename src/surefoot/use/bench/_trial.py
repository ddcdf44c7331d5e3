"""Measure a recipe in a new process: its memory is its own, and so is its end."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ... import errors
from ...errors import SurefootError
from ...parallel.world import die_with_launcher
from ...recipe.recipe import Recipe, dump, load
from ...storage.child import Child
from ...storage.memory import is_out_of_memory
from .measurement import BenchResult, measure


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
            ["-m", "surefoot.use.bench._trial", *map(str, files)], log=folder / "log", patience=0
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


OUT_OF_MEMORY = "out of memory"


def main(recipe: Path, steps: int, result: Path) -> None:
    """Measure, and write the result to ``result``."""
    die_with_launcher()
    found: dict[str, object]
    try:
        found = {"figures": asdict(measure(load(recipe), steps, result.parent / "run"))}
    except SurefootError as error:
        found = {"failure": str(error), "error": type(error).__name__}
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        found = {"failure": OUT_OF_MEMORY}
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
