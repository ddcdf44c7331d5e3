"""A column of a metric as a curve: thinned so that no spike is lost, or smoothed."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

Curve = tuple[list[float], list[float | None]]  # steps and values; None is not finite


@dataclass
class Column:
    """One metric: the steps at which it was logged, and its values; nan where it is not finite."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))


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
    sums = np.concatenate(([0.0], np.cumsum(np.where(is_number, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(is_number)))
    place = np.arange(len(values))
    reach = np.minimum(half, np.minimum(place, len(values) - 1 - place))
    start, end = place - reach, place + reach + 1
    with np.errstate(invalid="ignore"):  # no number in the window
        means = (sums[end] - sums[start]) / np.maximum(1, counts[end] - counts[start])
    return Column(column.steps, array("d", np.where(is_number, means, np.nan).tobytes()))
