"""What failures cost a run on many nodes, and how often it should save: by what saves and a start
have taken in this run, if it has begun."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoint.saving.intervals import FAILURES, FailureCosts, seconds_between_failures
from ...checkpoint.section import CheckpointSection
from ...storage.files import parse_json
from ...training.callbacks.launches import NAME, Follower
from .plan import Plan

_RESTART = 30.0  # seconds; where nothing was measured
_LEAST = 0.1  # seconds, of a copy or a save of a small model
_COPY, _WRITE = 10e9, 1e9  # bytes a second of one node, where nothing was measured


@dataclass(frozen=True)
class FailurePlan:
    """What failures cost a run."""

    nodes: int
    failures: float  # in 1,000 days of one node
    costs: FailureCosts
    is_measured: bool
    interval: float | None  # seconds between saves, as the recipe says; None: not known

    @property
    def is_usual(self) -> bool:
        """Whether nodes fail as often as ``checkpoint.save_minutes: auto`` expects."""
        return self.failures == FAILURES

    @property
    def between_failures(self) -> float:
        """Seconds."""
        return seconds_between_failures(self.nodes, self.failures)

    @property
    def best_interval(self) -> float:
        """Seconds between saves with which the least is lost."""
        return self.costs.best_interval(self.between_failures)

    def goodput(self, interval: float) -> float:
        """The share of the time that makes progress which is kept."""
        return self.costs.goodput(interval, self.between_failures)

    @classmethod
    def of(
        cls,
        run_plan: Plan,
        saves: CheckpointSection,
        folder: Path,
        nodes: int,
        failures: float | None = None,
    ) -> FailurePlan:
        """That of a run in ``folder`` on ``nodes`` that fail ``failures`` times in 1,000 days."""
        measured = _measured(folder)
        size = run_plan.saving.size.total / nodes
        stall, save = max(size / _COPY, _LEAST), max(size / _WRITE, _LEAST)
        assumed = FailureCosts(stall=stall, save=save, restart=_RESTART)
        return cls(
            nodes,
            FAILURES if failures is None else failures,
            measured or assumed,
            measured is not None,
            _interval(saves, run_plan, measured or assumed, nodes),
        )

    def as_data(self) -> dict[str, Any]:
        """All of it, as ``surefoot plan --json`` prints it."""
        known = self.interval
        return {
            "nodes": self.nodes,
            "failures_per_1000_node_days": self.failures,
            "seconds_between_failures": self.between_failures,
            **vars(self.costs),
            "is_measured": self.is_measured,
            "save_interval": known,
            "goodput": None if known is None else self.goodput(known),
            "best_save_interval": self.best_interval,
            "best_goodput": self.goodput(self.best_interval),
        }


def _measured(folder: Path) -> FailureCosts | None:
    """What the run in ``folder`` has recorded of its saves and its latest start."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        rows = [parse_json(line) for line in Follower(folder / NAME).read()[0]]
        row = next((row for row in reversed(rows) if row.get("num_saves")), None)
        return row and FailureCosts(
            stall=float(row["save_blocking_seconds"]) / int(row["num_saves"]),
            save=float(row["save_seconds"]),
            restart=float(row["seconds"]["starting"]),
        )
    return None


def _interval(
    saves: CheckpointSection, run_plan: Plan, costs: FailureCosts, nodes: int
) -> float | None:
    intervals, seconds = [], run_plan.seconds
    if saves.save_minutes == "auto":
        intervals.append(costs.best_interval(seconds_between_failures(nodes)))
    elif saves.save_minutes is not None:
        intervals.append(60 * saves.save_minutes)
    if saves.save_steps is not None and seconds is not None:
        intervals.append(saves.save_steps * seconds / max(1, run_plan.course.steps))
    return min(intervals, default=None)
