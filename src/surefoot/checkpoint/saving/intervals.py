"""How often to save: so that a failure takes back little, and saves themselves cost little.

With M seconds between two failures and a stall of d seconds a save, the best interval is about
sqrt(2 d M) (Young 1974); here with the terms of higher order of Daly (2006,
doi:10.1016/j.future.2004.11.016). No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FAILURES = 6.5  # in 1,000 days of a node with eight GPUs: arXiv:2410.21680, of its larger cluster
DETECTION = 1.0  # seconds until the ranks that live have ended: a heartbeat's interval
LEAST, MOST = 60.0, 3600.0  # seconds between saves that ``best_interval`` may give
FIRST = 300.0  # seconds until the first save, before anything is measured
_DAY = 86_400.0


def seconds_between_failures(nodes: int, failures: float = FAILURES) -> float:
    """Of a run on so many nodes, each of which fails ``failures`` times in 1,000 days; any one
    ends it."""
    return 1000 * _DAY / (failures * nodes)


@dataclass(frozen=True)
class FailureCosts:
    """Seconds that saves and failures take."""

    stall: float  # training stops for a save
    save: float  # from there until it is committed, while training continues
    restart: float  # from the end of the ranks to the next step: imports, data, model, state
    detection: float = DETECTION

    def best_interval(self, between_failures: float) -> float:
        """Seconds of training between two saves, within ``LEAST`` and ``MOST``, and never so few
        that one save begins before the last is committed."""
        half = self.stall / (2 * between_failures)
        found = between_failures
        if half < 1:
            young = math.sqrt(2 * self.stall * between_failures)
            found = young * (1 + math.sqrt(half) / 3 + half / 9) - self.stall
        return max(min(max(found, LEAST), MOST), 2 * self.save)

    def goodput(self, interval: float, between_failures: float) -> float:
        """The share of the time that makes progress which is kept, with a save after each
        ``interval`` seconds of training: what Daly's equation for exponential failures gives, if a
        failure takes back the training during a save as well."""
        lost = self.save + self.detection + self.restart
        exponents = lost / between_failures, (interval + self.stall) / between_failures
        if sum(exponents) > 700:
            return 0.0
        once = between_failures * math.exp(exponents[0]) * math.expm1(exponents[1])
        return interval / once
