"""What a tracker gets of a run, and what each of them has. No torch: worker processes
import it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Facts = Mapping[str, object]


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker sees it."""

    folder: Path  # of the run
    files: Path  # a folder for the tracker's own
    id: str  # the same in every launch
    name: str
    project: str | None  # None: as the package's own environment variable says
    config: Facts  # the recipe
    is_offline: bool = False  # nothing is to leave the machine


class Tracker(Protocol):
    """A run that is open in a tracker."""

    place: str
    """Where its curves are, or how they get there, in one clause."""

    def log(self, record: Mapping[str, float], step: int, line: int) -> None:
        """Add a record of ``metrics.jsonl``, which is line number ``line`` of all that were sent
        to this run, from 1."""

    def event(self, name: str, facts: Facts) -> None:
        """Something has happened to the run besides metrics, such as ``nan``."""

    def finish(self, outcome: str, facts: Facts) -> None:
        """The launch has ended: ``complete``, ``stopped``, ``failed`` or ``died``."""


def ignored(self: object, name: str, facts: Facts) -> None:
    """The event of a tracker that shows metrics only."""


def scalars(record: Mapping[str, float]) -> dict[str, float]:
    """``loss`` as ``train/loss``, ``eval_loss`` as ``eval/loss``, as the Hugging Face Trainer names
    them."""
    return {
        f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}": value
        for name, value in record.items()
        if name not in ("step", "epoch")
    }


def flat(config: Facts, before: str = "") -> dict[str, object]:
    """The settings of a recipe by their dotted paths."""
    found: dict[str, object] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = value
    return found
