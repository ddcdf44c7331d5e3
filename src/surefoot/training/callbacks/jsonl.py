"""``metrics.jsonl``: one JSON object per line, appended at once, no step twice.

The file of a killed run has lines of steps after its latest checkpoint. When the run resumes, it
repeats those steps; bitwise equal metrics are not written again. If they differ (another recipe, a
rollback), the old lines from there on are deleted, and the new ones are appended. Lines of earlier
steps that are missing or damaged, after a power failure say, are restored from the checkpoint.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import RunError
from ...storage.files import append_line, make_folder, raising, write_aside
from ..callback import Context, Metrics, TrainerCallback, TrainerControl, TrainerState

NAME = "metrics.jsonl"
OF_THE_CLOCK = ("tokens_per_second", "elapsed")  # figures that no resume can repeat
Record = Mapping[str, float | None]
Key = tuple[int, bool]  # step, and whether the line is of an evaluation
Lines = dict[Key, tuple[int, Record]]  # where each line begins, and its content


@dataclass
class Jsonl(TrainerCallback):
    """Appends every log to ``path``."""

    path: Path
    _lines: Lines = field(default_factory=dict)

    def on_train_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """Read the existing lines, and restore those that the log of the run has in addition; an
        incomplete last line after a crash is deleted."""
        self._lines = restore(self.path, state.log_history)

    def on_log(
        self, args: Context, state: TrainerState, control: TrainerControl, logs: Metrics
    ) -> None:
        """Append one line, unless it already exists."""
        record = _strict(logs)
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


def restore(path: Path, history: Sequence[Metrics]) -> Lines:
    """Give the file at ``path`` the lines of a run's ``history`` that it lacks; returns all lines.
    An incomplete last line is deleted."""
    with raising(RunError, "metrics"):
        make_folder(path.parent)
        content = path.read_bytes() if path.exists() else b""
        records = _restored(list(_records(content)), history)
        lines = [f"{json.dumps(record)}\n".encode() for record in records]
        if (text := b"".join(lines)) != content:
            write_aside(path, text)
    offsets = itertools.accumulate((len(line) for line in lines), initial=0)
    return {_key(r): (at, r) for at, r in zip(offsets, records, strict=False)}


def _records(content: bytes) -> Iterator[Record]:
    """The records of the lines before the first one that is incomplete or damaged."""
    for line in content.splitlines(keepends=True):
        record = _parse(line)
        if record is None:
            return
        yield record


def _restored(from_file: Sequence[Record], history: Sequence[Metrics]) -> list[Record]:
    """The records of the run's log so far, and those ``from_file`` that it does not have. Of equal
    ones that of the file stays: the clock's figures are those of the first time."""
    unlogged = {_key(record): record for record in from_file}
    logged = [_strict(record) for record in history if "step" in record]
    records = [_first(unlogged.pop(_key(record), None), record) for record in logged]
    return sorted([*records, *unlogged.values()], key=_key)


def _first(from_file: Record | None, logged: Record) -> Record:
    is_same = from_file is not None and _repeatable(from_file) == _repeatable(logged)
    return from_file if from_file is not None and is_same else logged


def _strict(record: Metrics) -> Record:
    return {name: _finite(value) for name, value in record.items()}


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
