"""Learning-rate schedules as pure functions of the step: nothing to save, nothing to restore. To
add one: write its function, add its line to ``SCHEDULES``.

Steps count from 0: the first update uses ``factor(0)``. The warmup rises over ``warmup_steps``
updates and is never zero (the Hugging Face schedules waste their first step at zero).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A factor in [0, 1] of the peak learning rate for every step of a run."""

    name: ScheduleName
    total_steps: int
    warmup_steps: int = 0
    min_ratio: float = 0.0  # the factor at the end
    decay_steps: int = 0  # wsd only: how many of the last steps decay

    def factor(self, step: int) -> float:
        """Factor of the update number ``step`` (from 0)."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return SCHEDULES[self.name](self, step)


def _progress(step: int, start: int, total: int) -> float:
    """The progress of ``step`` from ``start`` to ``total``, in [0, 1]."""
    return min(1.0, max(0.0, (step - start) / max(1, total - start)))


def _cosine(schedule: Schedule, step: int) -> float:
    """Half a cosine from 1 to ``min_ratio`` (arXiv:1608.03983, without restarts)."""
    done = _progress(step, schedule.warmup_steps, schedule.total_steps)
    return schedule.min_ratio + (1 - schedule.min_ratio) * 0.5 * (1 + math.cos(math.pi * done))


def _linear(schedule: Schedule, step: int) -> float:
    done = _progress(step, schedule.warmup_steps, schedule.total_steps)
    return schedule.min_ratio + (1 - schedule.min_ratio) * (1 - done)


def _constant(_schedule: Schedule, _step: int) -> float:
    return 1.0


def _wsd(schedule: Schedule, step: int) -> float:
    """Warmup, constant, linear decay over the last ``decay_steps`` (arXiv:2404.06395)."""
    start = max(schedule.warmup_steps, schedule.total_steps - schedule.decay_steps)
    done = _progress(step, start, schedule.total_steps)
    return schedule.min_ratio + (1 - schedule.min_ratio) * (1 - done)


def _wsd_cosine(schedule: Schedule, step: int) -> float:
    """As ``wsd``, with a decay along half a cosine (transformers' ``warmup_stable_decay``)."""
    start = max(schedule.warmup_steps, schedule.total_steps - schedule.decay_steps)
    done = _progress(step, start, schedule.total_steps)
    return schedule.min_ratio + (1 - schedule.min_ratio) * 0.5 * (1 + math.cos(math.pi * done))


def _inverse_sqrt(schedule: Schedule, step: int) -> float:
    """The inverse root of the steps over those of warmup (arXiv:1706.03762); 10,000 if none."""
    scale = schedule.warmup_steps or 10_000
    return 1 / math.sqrt((step - schedule.warmup_steps + scale) / scale)


SCHEDULES: dict[str, Callable[[Schedule, int], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "wsd": _wsd,
    "wsd_cosine": _wsd_cosine,
    "inverse_sqrt": _inverse_sqrt,
}
if TYPE_CHECKING:
    ScheduleName = str
else:  # the names that a recipe may give
    ScheduleName = Literal[tuple(SCHEDULES)]
