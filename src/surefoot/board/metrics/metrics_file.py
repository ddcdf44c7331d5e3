"""``metrics.jsonl`` as columns, read once and then followed.

Lines that are no records are counted and named, never guessed. A file that was cut or replaced, as
a resume may do, is read again; readers see that by its ``generation``.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from pathlib import Path

from ...errors import counted
from ...training.callbacks.follower import BLOCK, Follower, record
from .metrics_lines import read_many
from .thinning import Column

_MAX_PROBLEMS = 20
_MAX_COLUMNS = 500
_MUCH = 2 * BLOCK  # bytes, about 70,000 records
NAN = float("nan")


class MetricsFile:
    """A file of records, one JSON object with ``step`` in each line."""

    def __init__(self, path: Path) -> None:
        self.columns: dict[str, Column] = {}
        self.problems: list[str] = []
        self.num_broken = self.num_rows = 0
        self.path = path
        self.lock = threading.Lock()  # who reads columns while another thread may refresh
        self._follower = Follower(path)

    def refresh(self) -> None:
        """Read what is new. A missing file has nothing."""
        with self.lock:
            for block, is_other in self._follower.blocks():
                if is_other:
                    self.columns, self.problems, self.num_broken, self.num_rows = {}, [], 0, 0
                self._add_block(block)

    @property
    def is_behind(self) -> bool:
        """Whether so much is not read yet that somebody would notice."""
        return self._size() - self._follower.position > _MUCH

    def share_read(self) -> float:
        """The part of the file that has been read, from 0 to 1."""
        return min(1.0, self._follower.position / max(1, self._size()))

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def note(self) -> str | None:
        """What is wrong with the file, in one sentence."""
        if not self.num_broken:
            return None
        said = counted(self.num_broken, "line is", "lines are")
        return f"{said} not a record and skipped, such as {self.problems[0]}"

    def _add_block(self, block: bytes) -> None:
        for part in read_many(block):
            if isinstance(part, bytes):
                for line in part.split(b"\n")[:-1]:
                    self._add(line)
                continue
            self.num_rows += part.num_rows
            for name, (steps, values) in part.columns.items():
                self._put_many(name, steps, values)

    def _put_many(self, name: str, steps: array[float], values: array[float]) -> None:
        if name not in self.columns and len(self.columns) >= _MAX_COLUMNS:
            return
        column = self.columns.setdefault(name, Column())
        if steps and column.steps and column.steps[-1] > steps[0]:  # as in _put
            for step, value in zip(steps, values, strict=True):
                self._put(name, step, value)
            return
        column.steps.extend(steps)
        column.values.extend(values)

    def _add(self, line: bytes) -> None:
        self.num_rows += 1
        row = record(line)
        if row is None:
            self.num_broken += 1
            if len(self.problems) < _MAX_PROBLEMS:
                shown = line[:60].decode(errors="replace")
                self.problems.append(f"line {self.num_rows}: {shown!r}")
            return
        self.put_row(row)

    def put_row(self, row: dict[str, object]) -> None:
        """Add a record."""
        step = float(str(row["step"]))
        for name, value in row.items():
            if name != "step":
                self._put(name, step, value)

    def _put(self, name: str, step: float, value: object) -> None:
        column = self.columns.get(name)
        if column is None:
            if len(self.columns) >= _MAX_COLUMNS:
                return
            column = self.columns[name] = Column()
        is_number = type(value) in (int, float)
        if not is_number and value is not None:
            return
        try:
            number = float(value) if is_number else NAN  # type: ignore[arg-type]
        except OverflowError:
            number = NAN
        steps = column.steps
        if steps and step < steps[-1]:  # out of order: not the work of our writer
            place = bisect_right(steps, step)
            steps.insert(place, step)
            column.values.insert(place, number)
            return
        steps.append(step)
        column.values.append(number)
