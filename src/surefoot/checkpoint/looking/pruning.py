"""Decide which checkpoints of a run to keep, and delete the others while nothing trains."""

from __future__ import annotations

import difflib
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError
from ...storage import disk_usage
from ...storage.folder_lock import lock
from ..disk.commit import step_of
from ..disk.folder import open_checkpoint
from ..disk.retention import (
    RetentionDecision,
    RetentionPolicy,
    decide,
    drop_all,
    metrics_in,
    pinned,
    seconds,
)
from .listing import CheckpointLine, has_hashes, list_run, state_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PruneOptions:
    """The retention policy, and the metric of the best checkpoints."""

    rule: RetentionPolicy
    metric: str
    greater: bool
    resume: str = "auto"


@dataclass(frozen=True)
class PlannedCheckpoint:
    """A complete checkpoint, its metric, and whether it is kept."""

    line: CheckpointLine
    metric: float | None
    verdict: RetentionDecision


@dataclass(frozen=True)
class PrunePlan:
    """The decision about each checkpoint of a run."""

    checkpoints: Sequence[PlannedCheckpoint]
    freed_bytes: int  # on the disk, if those that go are removed

    @property
    def removable(self) -> Sequence[PlannedCheckpoint]:
        """Those to delete."""
        return [each for each in self.checkpoints if not each.verdict.stays]

    def remove(self) -> None:
        """Delete them."""
        drop_all([each.line.path for each in self.removable])


@contextmanager
def untrained(folder: Path) -> Iterator[None]:
    """Hold the run's lock, like a training process; ``CheckpointError`` if one has it."""
    held = lock(
        folder,
        CheckpointError,
        doing="cannot lock the run's folder",
        taken=f"{folder}: a process is training there, and deletes old checkpoints itself; "
        "stop it first, or add --dry-run",
    )
    with held:
        if not held.is_real:
            logger.warning(
                "%s: this file system has no locks, so a process that trains there is not "
                "noticed; prune only when none does",
                folder,
            )
        if saving := [line for line in list_run(folder) if line.is_being_written]:
            raise CheckpointError(
                f"{saving[0].path}: a checkpoint is still being saved, by the writer process of "
                "a run that ended; try again when it is done"
            )
        yield


def plan_pruning(folder: Path, options: PruneOptions) -> PrunePlan:
    """Decide about each complete Surefoot checkpoint of a run, which must have one."""
    if step_of(folder.resolve()) >= 0:
        raise CheckpointError(f"{folder}: it is a checkpoint; name the folder of its run")
    lines = {
        step_of(line.path): line  # by name, as a run finds the newest
        for line in list_run(folder)
        if has_hashes(line) and line.problem is None and not line.is_being_written
    }
    if not lines:
        raise CheckpointError(f"{folder}: it contains no complete Surefoot checkpoint to prune")
    metrics = _metrics(list(lines.values()), options)
    resume = Path(options.resume).resolve()
    pins = pinned(folder)
    protected = [
        step
        for step, line in lines.items()
        if line.is_best or step in pins or line.path.resolve() == resume
    ]
    verdicts = decide(
        {step: seconds(line.created) for step, line in lines.items()},
        options.rule,
        now=time.time(),
        metrics=metrics,
        greater=options.greater,
        protected=protected,
    )
    planned = [
        PlannedCheckpoint(lines[v.step], metrics.get(v.step), _named(lines[v.step], v, pins))
        for v in verdicts
    ]
    going = [item.line.path for item in planned if not item.verdict.stays]
    stored = [disk_usage.stored(path) for path in going if not path.is_symlink()]
    return PrunePlan(planned, disk_usage.freed(stored))


def _named(
    line: CheckpointLine, verdict: RetentionDecision, pins: Collection[int]
) -> RetentionDecision:
    """The same decision, with the reason why it is protected."""
    name = "pinned" if verdict.step in pins else "checkpoint.resume names it"
    name = "best" if line.is_best else name
    why = [name if reason == "protected" else reason for reason in verdict.why]
    return RetentionDecision(verdict.step, tuple(dict.fromkeys(why)))


def _metrics(lines: Sequence[CheckpointLine], options: PruneOptions) -> dict[int, float]:
    """The metric by step, from the logs of all checkpoints; the latest has precedence."""
    history = [row for line in lines for row in state_of(open_checkpoint(line.path)).history]
    found = metrics_in(history, options.metric)
    if not found and options.rule.keep_best and history:
        known = sorted({str(key) for row in history if isinstance(row, dict) for key in row})
        near = difflib.get_close_matches(options.metric, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise CheckpointError(f"--metric: {options.metric!r} was never logged; {hint}")
    return found
