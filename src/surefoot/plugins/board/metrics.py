"""``metrics.jsonl`` as columns, read once and then followed.

Lines that are no records are counted and named, never guessed. A file that was cut or replaced, as
a resume may do, is read again.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from pathlib import Path

from ...errors import counted
from ...training.callbacks.follower import Follower, record
from .curves import Column

_MAX_COLUMNS = 500
_NUMBERS = (int, float, type(None))  # None: not finite


class MetricsFile:
    """A file of records, one JSON object with ``step`` in each line."""

    def __init__(self, path: Path) -> None:
        self.columns: dict[str, Column] = {}
        self.num_broken = self.num_rows = 0
        self.lock = threading.Lock()  # who reads columns while another thread may refresh
        self._first_broken = ""
        self._follower = Follower(path)

    def refresh(self) -> None:
        """Read what is new. A missing file has nothing."""
        with self.lock:
            for block, is_other in self._follower.blocks():
                if is_other:
                    self.columns, self.num_broken, self.num_rows = {}, 0, 0
                for line in block.split(b"\n")[:-1]:
                    self._add(line)

    def note(self) -> str | None:
        """What is wrong with the file, in one sentence."""
        if not self.num_broken:
            return None
        said = counted(self.num_broken, "line is", "lines are")
        return f"{said} not a record and skipped, such as {self._first_broken}"

    def _add(self, line: bytes) -> None:
        self.num_rows += 1
        row = record(line)
        if row is not None:
            self.put_row(row)
            return
        self.num_broken += 1
        if self.num_broken == 1:
            shown = line[:60].decode(errors="replace")
            self._first_broken = f"line {self.num_rows}: {shown!r}"

    def put_row(self, row: dict[str, object]) -> None:
        """Add a record."""
        step = float(str(row.pop("step")))
        for name, value in row.items():
            if type(value) not in _NUMBERS:
                continue
            if (column := self.columns.get(name)) is None:
                if len(self.columns) == _MAX_COLUMNS:
                    continue
                column = self.columns[name] = Column()
            number = math.nan if value is None else float(value)  # type: ignore[arg-type]
            if column.steps and step < column.steps[-1]:  # out of order: not our writer's work
                place = bisect_right(column.steps, step)
                column.steps.insert(place, step)
                column.values.insert(place, number)
            else:
                column.steps.append(step)
                column.values.append(number)
