"""A column of a metric as a curve: thinned so that no spike is lost, or smoothed."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Column:
    """One metric: the steps at which it was logged, and its values; nan where it is not finite."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))


def thinned(
    column: Column, points: int, first: float = -math.inf, last: float = math.inf
) -> tuple[list[float], list[float | None]]:
    """At most about ``points`` steps and values between two steps: of each interval the smallest,
    the largest and one that is not finite, so that no spike is lost. None is not finite."""
    steps, values = column.steps, column.values
    low, high = bisect_left(steps, first), bisect_right(steps, last)
    low, high = max(0, low - 1), min(len(steps), high + 1)  # lines lead out of the picture
    if high - low <= points:
        chosen = list(range(low, high))
    else:
        chosen = _extremes(values, low, high, max(1, points // 2))
    return [steps[i] for i in chosen], [_finite(values[i]) for i in chosen]


def smoothed(column: Column, half: int) -> Column:
    """Means over ``half`` values before and after each, which so is not late. At both ends the
    window is as short on one side as on the other. Values that are not finite have no part in it,
    and remain."""
    import numpy as np  # not before it is needed: the board starts without it

    values = _numbers(column.values)
    is_number = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(is_number, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(is_number)))
    place = np.arange(len(values))
    reach = np.minimum(half, np.minimum(place, len(values) - 1 - place))
    start, end = place - reach, place + reach + 1
    with np.errstate(invalid="ignore"):  # no number in the window
        means = (sums[end] - sums[start]) / np.maximum(1, counts[end] - counts[start])
    return Column(column.steps, array("d", np.where(is_number, means, np.nan).tobytes()))


def _numbers(values: array[float]) -> Numbers:
    """A view; the array cannot grow as long as it exists."""
    import numpy as np

    return np.frombuffer(values, dtype=np.float64)


def _extremes(values: array[float], low: int, high: int, buckets: int) -> list[int]:
    numbers = _numbers(values)
    count = high - low
    chosen = {low, high - 1}
    for number in range(buckets):
        start = low + count * number // buckets
        part = numbers[start : low + count * (number + 1) // buckets]
        ends = int(part.argmin()), int(part.argmax())  # a value that is nan is both
        if all(math.isfinite(part[i]) for i in ends):
            chosen.update(start + i for i in ends)
        else:
            chosen |= _of_odd(part, start)
    return sorted(chosen)


def _of_odd(part: Numbers, start: int) -> set[int]:
    """Indices of a part with values that are not finite: one of those, and the extremes."""
    odd = next(i for i, value in enumerate(part) if not math.isfinite(value))
    finite = [i for i, value in enumerate(part) if math.isfinite(value)]
    ends = {min(finite, key=part.__getitem__), max(finite, key=part.__getitem__)} if finite else ()
    return {start + i for i in (odd, *ends)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
