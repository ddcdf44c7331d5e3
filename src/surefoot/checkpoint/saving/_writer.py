"""The program of the writer process.

Its command is ``python -m surefoot.checkpoint.saving._writer DESCRIPTOR SIZE``.

It reads one job per line from its standard input, writes it from the snapshot buffer at low
priority, and answers with a line. The end of its input also means that the training process is
dead. Then it commits what it has, and ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import sys
import traceback
from typing import Any

from ...errors import CheckpointError
from ._snapshot_buffer import SnapshotBuffer, parse_job
from .apart import save


class _OrphanedError(Exception):
    """The training process died before the temporary folder existed."""


def main(descriptor: int, size: int) -> None:
    """Serve until the end of the input."""
    # Little of a core that others want, but some: at idle priority a gigabyte took twice as long
    # during training, and slowed training as much in total.
    os.nice(19)
    arena = SnapshotBuffer(descriptor, size)
    with contextlib.suppress(_OrphanedError, BrokenPipeError):
        for line in sys.stdin.buffer:
            if not line.endswith(b"\n"):
                return  # the process that trains died in the middle of it
            sys.stdout.write(json.dumps(_serve(json.loads(line), arena)) + "\n")
            sys.stdout.flush()


def _serve(message: dict[str, Any], arena: SnapshotBuffer) -> dict[str, object]:
    job, images = parse_job(message, arena)
    try:
        saved = save(job, images, started=_must_not_be_orphaned, is_orphan=_is_orphaned)
    except CheckpointError as error:
        return {"error": str(error)}
    # A writer that ends without an answer is taken for killed, and its save is tried again.
    except Exception as error:
        if isinstance(error, _OrphanedError):
            raise
        traceback.print_exc()
        return {"error": f"cannot save {job.target}: {type(error).__name__}: {error}"}
    return {**dataclasses.asdict(saved), "path": str(saved.path)}


def _must_not_be_orphaned() -> None:
    """Give up if the training process is dead: a launch before the lock would not wait for this."""
    if _is_orphaned():
        raise _OrphanedError


def _is_orphaned() -> bool:
    # Only the training process has the other end (forks close it), so
    # it hangs up with that process.
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
