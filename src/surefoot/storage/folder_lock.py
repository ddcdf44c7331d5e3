"""Lock of a folder, until the process ends: one process saves to it at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from ..errors import CheckpointError
from . import files

NAME = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)  # as some network disks say


def lock(folder: Path) -> int:
    """Create ``folder`` and lock it; closing the descriptor releases the lock.

    The lock belongs to this process, not to its children, such as workers of a data loader, which
    may outlive it. Raises ``CheckpointError`` if another process has it.
    """
    with files.raising(CheckpointError, f"cannot save to {folder}"):
        files.make_folder(folder)
        descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(descriptor)
            raise CheckpointError(
                f"{folder}: another process is saving here; stop it or choose another folder"
            ) from None
    return descriptor
