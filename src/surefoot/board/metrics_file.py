"""``metrics.jsonl`` as columns, read once and then followed; thinned out for a curve.

Lines that are no records are counted and named, never guessed. A file that was cut or replaced, as
a resume may do, is read again; readers see that by its ``generation``.
"""

from __future__ import annotations

import math
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from ..callbacks.follower import Follower, record
from ..errors import counted
from .metrics_lines import read_many

_MAX_PROBLEMS = 20
_MAX_COLUMNS = 500
NAN = float("nan")


@dataclass
class Column:
    """One metric: the steps at which it was logged, and its values; nan where it is not finite."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))


class MetricsFile:
    """A file of records, one JSON object with ``step`` in each line."""

    def __init__(self, path: Path) -> None:
        self.columns: dict[str, Column] = {}
        self.problems: list[str] = []
        self.num_broken = self.num_rows = 0
        self._follower = Follower(path)
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Read what is new. A missing file has nothing."""
        with self._lock:
            for block, is_other in self._follower.blocks():
                if is_other:
                    self.columns, self.problems, self.num_broken, self.num_rows = {}, [], 0, 0
                self._add_block(block)

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


def thinned(
    column: Column, points: int, first: float = -math.inf, last: float = math.inf
) -> tuple[list[float], list[float | None]]:
    """At most about ``points`` steps and values between two steps: of each interval the smallest,
    the largest and one that is not finite, so that no spike is lost. None is not finite."""
    steps, values = column.steps, column.values
    low, high = bisect_left(steps, first), bisect_right(steps, last)
    low, high = max(0, low - 1), min(len(steps), high + 1)  # lines lead out of the picture
    count = high - low
    if count <= points:
        chosen: Sequence[int] = range(low, high)
    else:
        chosen = _extremes(values, low, high, max(1, points // 2))
    return [steps[i] for i in chosen], [_finite(values[i]) for i in chosen]


def smoothed(column: Column, half: int) -> Column:
    """Means over ``half`` values before and after each, which so is not late. At both ends the
    window is as short on one side as on the other. Values that are not finite have no part in it,
    and remain."""
    is_number = [math.isfinite(value) for value in column.values]
    finite = (v if ok else 0.0 for v, ok in zip(column.values, is_number, strict=True))
    sums = list(accumulate(finite, initial=0.0))
    counts = list(accumulate(is_number, initial=0))
    found = Column(column.steps)
    last = len(column.steps) - 1
    for i, ok in enumerate(is_number):
        reach = min(half, i, last - i)
        start, end = i - reach, i + reach + 1
        count = counts[end] - counts[start]
        found.values.append((sums[end] - sums[start]) / count if ok else NAN)
    return found


def _extremes(values: Sequence[float], low: int, high: int, buckets: int) -> list[int]:
    count = high - low
    chosen = {low, high - 1}
    for number in range(buckets):
        start = low + count * number // buckets
        end = low + count * (number + 1) // buckets
        part = values[start:end]
        smallest, largest = min(part), max(part)
        if math.isfinite(smallest) and math.isfinite(largest) and not _has_nan(part):
            chosen.add(start + part.index(smallest))
            chosen.add(start + part.index(largest))
            continue
        chosen |= _of_odd(part, start)
    return sorted(chosen)


def _has_nan(part: Sequence[float]) -> bool:
    total = sum(part)
    return total != total  # noqa: PLR0124 - nan is not equal to itself


def _of_odd(part: Sequence[float], start: int) -> set[int]:
    """Indices of a part with values that are not finite: one of those, and the extremes."""
    odd = next(i for i, value in enumerate(part) if not math.isfinite(value))
    finite = [i for i, value in enumerate(part) if math.isfinite(value)]
    ends = {min(finite, key=part.__getitem__), max(finite, key=part.__getitem__)} if finite else ()
    return {start + i for i in (odd, *ends)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
