"""The goodput that ``surefoot plan --nodes`` prints, beside a simulation of saves and failures.

    .venv/bin/python benchmarks/goodput.py [--days 2000] [--seed 0]

Simulated is one run after another on 8 to 16,384 ranks, eight a node: failures come at random, also
while a failure is dealt with; a save stops training for a moment and is committed later, while
training continues; a failure takes back all steps since the latest committed save. Not simulated,
and so assumed: any failure ends all ranks, none hides, spare nodes are there at once, the same
costs on all sizes, and no failures in crowds. No training: pure Python.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from itertools import count

import measure

from surefoot.checkpoint.saving.intervals import FailureCosts, seconds_between_failures

COSTS = FailureCosts(stall=1.0, save=20.0, restart=30.0)  # of a large model, a second a copy
_DAY = 86_400.0


def simulated(
    costs: FailureCosts, interval: float, between: float, seconds: float, seed: int
) -> float:
    """The share of so many seconds whose training was kept."""
    draw = random.Random(seed)
    now, kept, failure = 0.0, 0.0, draw.expovariate(1 / between)
    while now < seconds:
        began, committed = now, 0  # saves of this launch
        for number in count(1):  # the end of each stretch of training, with its save
            end = began + number * (interval + costs.stall)
            if failure < end + costs.save:
                break
            committed = number
        kept += committed * interval
        now = failure + costs.detection + costs.restart
        failure = failure + draw.expovariate(1 / between)
        while failure < now:  # while the last one is dealt with
            now = failure + costs.detection + costs.restart
            failure += draw.expovariate(1 / between)
    return kept / now


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--days", type=float, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rows = []
    for ranks in (8, 64, 512, 1024, 4096, 16_384):
        between = seconds_between_failures(ranks // 8)
        for title, costs in (("", COSTS), (", synchronous", replace(COSTS, stall=21.0, save=0.0))):
            best = costs.best_interval(between)
            seconds = max(asked.days * _DAY, 200 * between)
            for name, interval in (("best", best), ("30 minutes", 1800.0)):
                found = simulated(costs, interval, between, seconds, asked.seed)
                said = costs.goodput(interval, between)
                rows.append(
                    [
                        f"{ranks:,}{title}",
                        f"{between / 3600:,.1f} h",
                        name,
                        f"{interval:,.0f} s",
                        f"{said:.4f}",
                        f"{found:.4f}",
                    ]
                )
    print(measure.machine(), "\n")
    columns = ["ranks", "a failure each", "saves", "each", "the formula", "simulated"]
    print(measure.table(columns, rows))


if __name__ == "__main__":
    main()
