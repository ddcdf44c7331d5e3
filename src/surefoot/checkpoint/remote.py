"""Runs and checkpoints with URLs: what a plugin that reaches their stores has to do."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..extensions import Extended
from ..storage.address import Address
from .looking.listing import CheckpointLine
from .verification import Report

if TYPE_CHECKING:
    from .saving.saver import RunMirror


class RemoteRun(Protocol):
    """The part of a run that is in an object store, as it was found at the launch."""

    address: Address

    @property
    def steps(self) -> Collection[int]:
        """The steps that exist there, as far as is known."""

    def newest_sound(self) -> Path | None:
        """The local folder to resume from, downloaded if need be; None if there is no checkpoint.
        Raises ``CheckpointError`` if there are some, none of which is valid."""

    def get(self, name: str) -> Path:
        """One checkpoint and the logs of the run, downloaded unless a local copy exists."""

    def write(self, name: str, data: bytes) -> None:
        """Upload a small file of the run."""

    def mirror(self) -> RunMirror:
        """What uploads while the run trains."""


class RemoteStores(Protocol):
    """Object stores, in which runs and checkpoints have URLs. All raise ``CheckpointError``."""

    def open_run(self, address: Address, folder: Path, *, seconds: float) -> RemoteRun:
        """The run at ``address``, which works in ``folder``; its recipe is downloaded."""

    def fetch(self, address: Address, cache: Path | None = None, *, seconds: float = 600) -> Path:
        """The local copy of a checkpoint, or of the latest one of a run, which must be valid."""

    def lines(self, address: Address, *, verified: bool) -> list[CheckpointLine]:
        """One line for each checkpoint of a run, oldest first, or the one of a checkpoint."""

    def verify(self, checkpoint: Address, *, full: bool) -> Report:
        """Check what is stored: its lengths, or every byte."""


_STORES: Extended[RemoteStores] = Extended("stores", {})


def stores() -> RemoteStores:
    """What opens runs at URLs."""
    return _STORES["fsspec"]
