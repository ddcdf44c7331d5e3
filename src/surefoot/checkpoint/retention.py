"""Which checkpoints stay. A checkpoint is forgotten at one stroke, then its space is freed."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from .. import files
from ..errors import CheckpointError
from .commit import committed, drop


def forget(root: Path, *, keep: int | None, protected: Collection[Path] = ()) -> list[Path]:
    """Drop all but the ``keep`` newest checkpoints and the ``protected`` ones; what was dropped.

    The newest one always stays. ``keep=None`` keeps all.
    """
    if keep is None:
        return []
    safe = {path.resolve() for path in protected}
    old = committed(root)[: -max(keep, 1)]
    dropped = [folder for folder in old if folder.resolve() not in safe]
    with files.raising(CheckpointError, f"cannot remove an old checkpoint of {root}"):
        for folder in dropped:
            drop(folder)
    return dropped
