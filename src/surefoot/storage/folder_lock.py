"""Lock of a folder, until the process ends: one process saves to it at a time; and its identity."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from ..errors import CheckpointError
from . import files

NAME = ".lock"


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
        if error.errno not in files.NO_LOCKS:
            os.close(descriptor)
            raise CheckpointError(
                f"{folder}: another process is saving here; stop it or choose another folder"
            ) from None
    return descriptor


def is_held(path: Path) -> bool | None:
    """Whether a process holds the lock file ``path``; None if the file system has none.

    The lock is taken for an instant, shared with other readers; who takes it alone waits so long.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        return None if error.errno in files.NO_LOCKS else True
    finally:
        os.close(descriptor)
    return False


class FolderIdentity:
    """A folder that is held open, so that it is distinguished from another one of its name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def is_there(self) -> bool:
        """Whether it still has its name."""
        return self._is_at(self._path)

    def current_path(self) -> Path | None:
        """Where it is now, after it was renamed; None if it was removed, or that is not known."""
        try:
            found = Path(f"/proc/self/fd/{self._descriptor}").readlink()
        except OSError:
            return None
        return found if self._is_at(found) else None

    def close(self) -> None:
        """Hold it no longer."""
        self._close()

    def _is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False
