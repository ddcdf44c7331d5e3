"""Ranks that have no folder in common: where they save in a store, and their folders here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..storage import files


def inside(folder: Path | str) -> Path:
    """Where the parts of ranks are in the folder of a run."""
    return Path(folder) / ".apart"


@dataclass(frozen=True, kw_only=True)
class Apart:
    """The store in which the ranks of one launch save together, and their folder of the run. Each
    machine has another one there."""

    url: str  # of the run
    launch: int
    history: Sequence[Sequence[int]]  # the last step and the number of each launch before, in order
    folder: str
    seconds: float  # of failures in a row, before a transfer has failed

    def launch_of(self, step: int) -> int:
        """The launch that has saved a step."""
        return next((number for last, number in self.history if step <= last), self.launch)

    def part_of(self, rank: int, launch: int | None = None) -> Path:
        """The folder in which a rank has its part of each checkpoint that a launch has saved."""
        return inside(self.folder) / str(launch or self.launch) / f"rank_{rank:05d}"

    def outlines(self, machine: int) -> Path:
        """The folder for what the ranks of a machine read of checkpoints in the store."""
        return inside(self.folder) / str(self.launch) / f"machine_{machine:05d}"

    def outdated(self) -> list[Path]:
        """What nobody reads once this launch has committed: parts of earlier launches, and
        outlines. Both are in the store. A later launch may have taken over on this machine."""
        root = inside(self.folder)
        earlier = [root / n for n in files.names_in(root) if n.isdigit() and int(n) < self.launch]
        own = root / str(self.launch)
        outlines = [own / n for n in files.names_in(own) if n.startswith("machine_")]
        return [*earlier, *outlines]


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """One rank's part of a save of all of them."""

    step: int
    rank: int
    world_size: int
    nonce: str  # of the save, on which they have agreed
