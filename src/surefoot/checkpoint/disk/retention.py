"""Retention policy: which checkpoints to keep, as a pure function, and the deletion of the others.

A checkpoint is kept if any reason holds, so every further setting can only keep more. No clock is
trusted: ages count back from the latest checkpoint, or from now if now is earlier. No policy
deletes what is pinned: the steps in ``pinned.json`` of a run.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path

from ...errors import CheckpointError, explain
from ...storage import files
from .commit import committed, delete, step_of
from .folder import open_checkpoint

HOUR = 3600  # seconds
_MOST_SHARING = 8


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """Which checkpoints to keep in addition to the latest and the best. Without ``keep``, all."""

    keep: int | None = None  # so many of the newest
    keep_every: int | None = None  # those whose step is a multiple of this
    keep_best: int | None = None  # so many of the best by a metric
    keep_hours: float | None = None  # those saved within so many hours before the newest

    def __post_init__(self) -> None:
        for name in ("keep", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.keep_hours is not None and not self.keep_hours > 0:
            raise ValueError(f"keep_hours must be positive, got {self.keep_hours}")

    def __str__(self) -> str:
        given = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ", ".join(f"{name}: {value}" for name, value in given if value is not None)

    @property
    def most_sharing(self) -> int:
        """How many checkpoints may share one file: of those that are kept, two never do."""
        return _MOST_SHARING if self.keep in (None, 1) else min(_MOST_SHARING, self.keep - 1)


@dataclass(frozen=True)
class RetentionDecision:
    """The decision about ``step``: kept for these reasons, or deleted if there are none."""

    step: int
    why: tuple[str, ...]

    @property
    def stays(self) -> bool:
        """Whether there is any reason."""
        return bool(self.why)


def decide(
    saved: Mapping[int, float | None],
    rule: RetentionPolicy,
    *,
    now: float,
    metrics: Mapping[int, float] | None = None,
    greater: bool = False,
    protected: Collection[int] = (),
) -> list[RetentionDecision]:
    """Decide about every checkpoint, oldest step first.

    ``saved`` has, by step, when it was saved, in seconds since 1970 like ``now``; one without a
    time counts as young. ``metrics`` are by step; nan is never best. ``protected`` steps, such as
    the one resumed from, are always kept.
    """
    steps = sorted(saved)
    newest = steps[-(rule.keep or 1) :] if steps else []
    saved_metrics = {step: value for step, value in (metrics or {}).items() if step in saved}
    best = ranked(saved_metrics, greater=greater)[: rule.keep_best or 1]
    verdicts = []
    for step in steps:
        reasons = {
            "latest": step == steps[-1],
            f"among the latest {rule.keep}": step != steps[-1] and step in newest,
            "all are kept": rule.keep is None and step != steps[-1],
            "best": step in best[:1],
            f"among the best {rule.keep_best}": step in best[1:],
            f"a multiple of {rule.keep_every}": rule.keep_every and step % rule.keep_every == 0,
            f"of the last {rule.keep_hours:g} h" if rule.keep_hours else "": _is_young(
                saved[step], saved[steps[-1]], rule.keep_hours, now
            ),
            "protected": step in protected,
        }
        verdicts.append(
            RetentionDecision(step, tuple(reason for reason, holds in reasons.items() if holds))
        )
    return verdicts


def ranked(metrics: Mapping[int, float], *, greater: bool) -> list[int]:
    """The steps from the best to the worst; among equals the earliest first, without nan."""
    sign = -1 if greater else 1
    steps = [step for step, value in metrics.items() if not math.isnan(value)]
    return sorted(steps, key=lambda step: (sign * metrics[step], step))


def _is_young(
    created: float | None, newest: float | None, keep_hours: float | None, now: float
) -> bool:
    if keep_hours is None:
        return False
    end = now if newest is None else min(now, newest)
    return created is None or end - created <= keep_hours * HOUR


def seconds(created: str | None) -> float | None:
    """A manifest's ``created`` in seconds since 1970; None if it is not a time."""
    try:
        moment = datetime.fromisoformat(created or "")
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def steady_clock() -> Callable[[], float]:
    """Seconds since 1970 by the wall clock of now, and then by one that never jumps: a clock that
    is set forward in the middle of a run must not make its checkpoints old."""
    began, since = time.time(), time.monotonic()
    return lambda: began + time.monotonic() - since


@dataclass(frozen=True)
class Times:
    """When the checkpoints under ``root`` were saved, as far as a policy needs it."""

    root: Path
    clock: Callable[[], float] = field(default_factory=steady_clock)
    _known: dict[int, float | None] = field(default_factory=dict)

    def of(self, rule: RetentionPolicy, *, coming: int | None = None) -> dict[int, float | None]:
        """Seconds since 1970 by step, None if not needed or unknown; now, for the coming one."""
        # Only keep_hours needs times, and each costs the reading of a manifest.
        needs_times = rule.keep_hours is not None
        times = {step_of(p): self._of(p) if needs_times else None for p in committed(self.root)}
        if coming is not None:
            times[coming] = self._known[coming] = self.clock()
        return times

    def known(self, step: int) -> float | None:
        """When it was saved, if this was in this launch, or was looked up before."""
        return self._known.get(step)

    def _of(self, path: Path) -> float | None:
        step = step_of(path)
        if step not in self._known:
            try:
                self._known[step] = seconds(open_checkpoint(path).manifest.created)
            except CheckpointError:
                self._known[step] = None
        return self._known[step]


def drop_all(folders: Sequence[Path]) -> None:
    """Delete checkpoints, each atomically; an error at the first that cannot be deleted."""
    for folder in folders:
        with files.raising(CheckpointError, f"cannot delete an old checkpoint of {folder.parent}"):
            delete(folder)


NAME = "pinned.json"
_MAX_BYTES = 1 << 20


def pinned(root: Path) -> set[int]:
    """The steps that are pinned. Raises ``CheckpointError`` if the file cannot be read: nothing is
    deleted then."""
    path = root / NAME
    try:
        steps = files.parse_json(files.read_inside(root, NAME, _MAX_BYTES))
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise CheckpointError(f"{explain(error)}; repair or delete the file") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); repair or delete it") from None
    if not isinstance(steps, list) or any(type(step) is not int for step in steps):
        raise CheckpointError(f"{path}: expected a list of steps; repair or delete it")
    return set(steps)


ORIGIN = "origin.json"  # in the folder of a run that continues another one after one of its steps


def origin_of(root: Path) -> tuple[str, int] | None:
    """The folder of the run that the one in ``root`` continues, and after which step; None if it
    continues none."""
    origin: object = None
    with contextlib.suppress(OSError, ValueError):
        origin = files.parse_json(files.read_inside(root, ORIGIN, _MAX_BYTES))
    run, step = (origin.get(n) if isinstance(origin, dict) else None for n in ("run", "step"))
    return (run, step) if isinstance(run, str) and isinstance(step, int) else None


def pin(root: Path, step: int, *, is_pinned: bool) -> set[int]:
    """Pin the checkpoint of ``step``, or no longer; returns all steps that are. Raises
    ``CheckpointError`` if there is no such checkpoint."""
    saved_steps = {step_of(path) for path in committed(root)}
    if is_pinned and step not in saved_steps:
        raise CheckpointError(f"{root}: has no checkpoint-{step} to pin")
    pins = pinned(root)
    pins = pins | {step} if is_pinned else pins - {step}
    with files.raising(CheckpointError, "cannot pin"):
        files.write_aside(root / NAME, (json.dumps(sorted(pins)) + "\n").encode())
    return pins
