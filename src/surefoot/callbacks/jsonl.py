"""``metrics.jsonl``: one JSON object per line, appended at once, no step twice.

The file of a killed run has lines of steps after its latest checkpoint. When the run resumes, it
repeats those steps; bitwise equal metrics are not written again. If they differ (another recipe, a
rollback), the old lines from there on are deleted, and the new ones are appended.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import RunError
from ..storage.files import append_line, make_folder, raising
from ..training.callback import Context, Metrics, TrainerCallback
from ..training.state import TrainerControl, TrainerState

NAME = "metrics.jsonl"
OF_THE_CLOCK = ("tokens_per_second", "elapsed")  # figures that no resume can repeat
Record = Mapping[str, float | None]
Key = tuple[int, bool]  # step, and whether the line is of an evaluation


@dataclass
class Jsonl(TrainerCallback):
    """Appends every log to ``path``."""

    path: Path
    _lines: dict[Key, tuple[int, Record]] = field(default_factory=dict)

    def on_train_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Read the existing lines; an incomplete last line after a crash is deleted."""
        self._lines, offset = {}, 0
        with raising(RunError, "metrics"):
            make_folder(self.path.parent)
        for line in self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else ():
            record = _parse(line)
            if record is None:
                os.truncate(self.path, offset)
                break
            self._lines[_key(record)] = (offset, record)
            offset += len(line)

    def on_log(
        self, args: Context, state: TrainerState, control: TrainerControl, logs: Metrics
    ) -> None:
        """Append one line, unless it already exists."""
        record: Record = {name: _finite(value) for name, value in logs.items()}
        key = _key(record)
        if key in self._lines:
            offset, old = self._lines[key]
            if _repeatable(old) == _repeatable(record):
                return
            os.truncate(self.path, offset)
            self._lines = {k: line for k, line in self._lines.items() if line[0] < offset}
        offset = self.path.stat().st_size if self.path.exists() else 0
        self._lines[key] = (offset, record)
        with raising(RunError, "metrics"):
            append_line(self.path, json.dumps(record))


def _parse(line: bytes) -> Record | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _key(record: Mapping[str, object]) -> Key:
    return int(str(record["step"])), "loss" not in record


def _repeatable(record: Mapping[str, object]) -> dict[str, object]:
    return {
        name: value
        for name, value in record.items()
        if name not in OF_THE_CLOCK and not name.endswith(("_per_second", "_runtime"))
    }


def _finite(value: float) -> float | None:
    """Convert to strict JSON, which does not support nan."""
    return value if math.isfinite(value) else None
