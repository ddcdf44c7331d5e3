"""``metrics.jsonl`` as columns, read once and then followed; and a column as a curve.

Lines that are no records are counted and named, never guessed. A file that was cut or replaced, as
a resume may do, is read again. A curve is thinned so that no spike is lost, or smoothed.
"""

from __future__ import annotations

import math
import threading
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import counted
from ...training.callbacks.launches import Follower, record

_MAX_COLUMNS = 500
_NUMBERS = (int, float, type(None))  # None: not finite


Curve = tuple[list[float], list[float | None]]  # steps and values; None is not finite


@dataclass
class Column:
    """One metric: the steps at which it was logged, and its values; nan where it is not finite."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))


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
            # From where it ended the last time: the first look at 100,000 logs takes about a second
            # of a core (decisions/0069).
            for block, is_other in self._follower.blocks():
                if is_other:
                    self.columns, self.num_broken, self.num_rows = {}, 0, 0
                for line in block.split(b"\n")[:-1]:
                    self._add(line)

    def note(self) -> str | None:
        """What is wrong with the file, in one sentence."""
        if not self.num_broken:
            return None
        broken_lines = counted(self.num_broken, "line is", "lines are")
        return f"{broken_lines} not a record and skipped, such as {self._first_broken}"

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
                # Anybody may have written the file: names without end would fill the memory.
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


def thinned(column: Column, points: int, first: float = -math.inf, last: float = math.inf) -> Curve:
    """At most about ``points`` steps and values between two steps: of each interval the smallest,
    the largest and one that is not finite, so that no spike is lost."""
    steps, values = column.steps, column.values
    low, high = bisect_left(steps, first), bisect_right(steps, last)
    low, high = max(0, low - 1), min(len(steps), high + 1)  # lines lead out of the picture
    chosen = range(low, high)
    if high - low > points:
        chosen = _extremes(values, low, high, max(1, points // 2))  # type: ignore[assignment]
    shown = [value if math.isfinite(value := values[i]) else None for i in chosen]
    return [steps[i] for i in chosen], shown


def _extremes(values: array[float], low: int, high: int, intervals: int) -> list[int]:
    import numpy as np  # not before it is needed: the board starts without it

    numbers = np.frombuffer(values, dtype=np.float64)
    chosen = {low, high - 1}
    for places in np.array_split(np.arange(low, high), intervals):
        part = numbers[places]
        is_finite = np.isfinite(part)
        if is_finite.any():
            chosen |= {int(places[np.where(is_finite, part, np.inf).argmin()])}
            chosen |= {int(places[np.where(is_finite, part, -np.inf).argmax()])}
        if not is_finite.all():
            chosen.add(int(places[is_finite.argmin()]))
    return sorted(chosen)


def smoothed(column: Column, half: int) -> Column:
    """Means over ``half`` values before and after each, which so is not late. At both ends the
    window is as short on one side as on the other. Values that are not finite have no part in it,
    and remain."""
    import numpy as np

    values = np.frombuffer(column.values, dtype=np.float64)
    is_number = np.isfinite(values)
    # Sums of all before: a window costs the same, however wide it is.
    sums = np.concatenate(([0.0], np.cumsum(np.where(is_number, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(is_number)))
    place = np.arange(len(values))
    reach = np.minimum(half, np.minimum(place, len(values) - 1 - place))
    start, end = place - reach, place + reach + 1
    with np.errstate(invalid="ignore"):  # no number in the window
        means = (sums[end] - sums[start]) / np.maximum(1, counts[end] - counts[start])
    return Column(column.steps, array("d", np.where(is_number, means, np.nan).tobytes()))
