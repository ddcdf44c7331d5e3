"""Find the latest valid checkpoint, after orphaned writers have ended and leftovers are deleted."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from ...errors import CheckpointError
from ..disk.commit import being_written, clean, mark_damaged
from ..layouts.detection import is_foreign
from .verification import find_latest

logger = logging.getLogger(__name__)
_PAUSE = 0.1  # seconds between two looks


def recover_latest(root: Path | str) -> Path | None:
    """The latest checkpoint under ``root`` whose every byte verifies; None to start from scratch.

    Call it at the start of a run, while no other one saves to ``root``. It waits for a save that
    outlived a killed run, deletes the leftovers of other saves, and renames a checkpoint that does
    not verify, so that its step can be saved again. All of it is logged. Raises ``CheckpointError``
    if there are only foreign checkpoints.
    """
    root = Path(root)
    wait_for_orphans(root)
    for leftover in clean(root):
        logger.info("removed %s, the temporary folder of an interrupted save", leftover.name)
    found = find_latest(root)
    for path, reason in found.passed_over:
        if found.path is None and is_foreign(path):
            raise CheckpointError(
                f"{path}: not a Surefoot checkpoint, and saves would reach its step; move it "
                "away or choose another folder"
            )
        aside = mark_damaged(path)
        logger.warning("%s failed verification (%s); renamed to %s", path.name, reason, aside.name)
    if found.passed_over and found.path is None:
        logger.warning("no valid checkpoint in %s: starting from scratch", root)
    return found.path


def wait_for_orphans(root: Path) -> None:
    """Wait for the last snapshot of a killed run, so that the run resumes from it."""
    if writing := being_written(root):
        logger.info(
            "the previous launch ended during a save: waiting for its writer process to finish %s",
            writing[0].name,
        )
    while writing:
        time.sleep(_PAUSE)
        writing = being_written(root)
