"""What follows the saves of a run, as a mirror of it in an object store does."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol


class SaveListener(Protocol):
    """Follows the saves of one run on rank 0, as a mirror in an object store does."""

    @property
    def steps(self) -> Collection[int]:
        """Steps whose checkpoints it keeps: the retention policy decides about them as well."""

    @property
    def protected(self) -> Collection[int]:
        """Steps whose checkpoints must not be deleted yet."""

    def on_save(self, replaces: Collection[str]) -> None:
        """A save begins; the checkpoints that it ``replaces`` are deleted when it is committed."""

    def on_committed(self, path: Path, replaces: Collection[str]) -> None:
        """``path`` is committed, and the checkpoints that it ``replaces`` are deleted."""

    def on_deleted(self, names: Collection[str]) -> None:
        """The checkpoints of these ``names`` are deleted by the retention policy."""

    def on_poll(self) -> None:
        """The loop is between two steps. Must return at once."""

    def finish(self) -> None:
        """Wait until nothing is left to do. Raises ``CheckpointError`` if something failed."""


class RunMirror(SaveListener, AbstractContextManager["RunMirror"], Protocol):
    """Uploads what is saved; at the end of the block it waits until everything is uploaded."""
