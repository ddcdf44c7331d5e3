"""Find the latest valid checkpoint, after orphaned writers have ended and leftovers are deleted."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from ...errors import CheckpointError
from ...storage.stalls import StallWatch, process_with, state_of
from ..disk.commit import being_written, clean, mark_damaged
from ..disk.manifest import MANIFEST
from ..layouts.detection import is_foreign
from .verification import Found, find_latest

logger = logging.getLogger(__name__)
_PAUSE = 0.1  # seconds between two looks
_PATIENCE = 300.0  # seconds in which a writer process must write something


MOVE_AWAY = "move all of them to another folder"
_SHOWN = 3  # checkpoints in a message


def recover_latest(root: Path | str, *, from_scratch: str = MOVE_AWAY) -> Path | None:
    """The latest checkpoint under ``root`` whose every byte verifies; None if there are none.

    Call it at the start of a run, while no other one saves to ``root``. It waits for a save that
    outlived a killed run, deletes the leftovers of other saves, and renames a checkpoint that does
    not verify, so that its step can be saved again. All of it is logged. Raises ``CheckpointError``
    if there are checkpoints and none is valid, or if there are only foreign ones; nothing is
    renamed then. ``from_scratch`` says what to do to start from scratch.
    """
    root = Path(root)
    wait_for_orphans(root)
    for leftover in clean(root):
        logger.info("removed %s, the temporary folder of an interrupted save", leftover.name)
    found = find_latest(root)
    if found.path is None:
        refuse_foreign(found)
        refuse_damaged(str(root), found, from_scratch)
    set_aside(found)
    return found.path


def refuse_foreign(found: Found) -> None:
    """Raise ``CheckpointError`` if a checkpoint that was passed over is that of another tool."""
    for path, _ in found.passed_over:
        if is_foreign(path):
            raise CheckpointError(
                f"{path}: not a Surefoot checkpoint, and saves would reach its step; move it "
                "away or choose another folder"
            )


def refuse_damaged(where: str, found: Found, from_scratch: str) -> None:
    """Raise ``CheckpointError`` if there are checkpoints, none of which is valid: to train from
    step 0 again is for the user to decide."""
    if found.passed_over:
        reasons = [f"{path.name}: {reason}" for path, reason in found.passed_over[:_SHOWN]]
        left = len(found.passed_over) - len(reasons)
        more = [f"and {left} more, see `surefoot ckpt ls --verify`"] if left else []
        raise CheckpointError(
            f"{where}: it contains no valid checkpoint to resume from ("
            f"{'; '.join([*reasons, *more])}). Restore a file that is named here from a copy; or, "
            f"to start from scratch, {from_scratch}"
        )


def set_aside(found: Found) -> None:
    """Rename the checkpoints that were passed over, and log why."""
    for path, reason in found.passed_over:
        aside = mark_damaged(path)
        logger.warning("%s failed verification (%s); renamed to %s", path.name, reason, aside.name)


def wait_for_orphans(root: Path) -> None:
    """Wait for the last snapshot of a killed run, so that the run resumes from it. Raises
    ``CheckpointError`` if its writer process hangs."""
    if not (writing := being_written(root)):
        return
    watch, writer = StallWatch(lambda: writing), _writer_of(writing[0])
    logger.info(
        "the previous launch ended during a save: waiting for its writer process%s to finish %s",
        "" if writer is None else f" (pid {writer})",
        writing[0].name,
    )
    while writing := being_written(root):
        if (stalled := watch.seconds()) > _PATIENCE:
            raise CheckpointError(_stuck(writing[0], stalled))
        time.sleep(_PAUSE)


def _writer_of(part: Path) -> int | None:
    return process_with(part / MANIFEST)


def _stuck(part: Path, seconds: float) -> str:
    """What to do about a writer process that hangs."""
    pid = _writer_of(part)
    if pid is None:
        who = "a process on another machine, or in another container,"
        cure = f"end it, or remove {part}"
    else:
        state = state_of(pid)
        who = f"process {pid}{f', which is {state},' if state else ''}"
        cure = f"let it continue with `kill -CONT {pid}`, or end it with `kill -KILL {pid}`"
    return (
        f"{part}: {who} has been writing this checkpoint since the previous launch, and wrote "
        f"nothing for {seconds:,.0f} s; {cure}. Then start again: the run resumes from the latest "
        "valid checkpoint"
    )
