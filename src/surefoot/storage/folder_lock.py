"""Who has a folder: its lock until the process ends, its identity, and whether it still writes.

One process writes in a folder at a time. There is one kind of lock, ``flock``. Those of ``lockf``
are not seen by it on Linux, so that a run and a program that saves with the library would both have
the folder.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from ..errors import SurefootError
from . import files

NAME = ".lock"
_GLANCE = 0.2  # seconds for whoever only looks whether there is a lock, such as a board


@dataclass(frozen=True)
class FolderLock:
    """A folder that is locked until the process ends, this is closed, or it is forgotten."""

    file: files.File
    is_real: bool  # False: the file system has no locks, and another process is not noticed

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def lock(
    folder: Path,
    kind: type[SurefootError],
    *,
    doing: str,
    taken: str,
    name: str = NAME,
    waits: Callable[[], bool] = lambda: False,
) -> FolderLock:
    """Create ``folder`` and lock it. The lock is not that of children, such as workers of a data
    loader, which may outlive this process. If another process has it for longer than an instant,
    ``waits`` decides, before each try, whether there is another one.

    Raises:
        kind: with ``taken`` if another one has it; else what fails, after ``doing``.
    """
    with files.raising(kind, doing):
        files.make_folder(folder)
        file = files.open_or_create(folder / name)
        deadline = time.monotonic() + _GLANCE
        while True:
            try:
                is_real = file.lock()
                break
            except BlockingIOError:
                if time.monotonic() > deadline and not waits():
                    file.close()
                    raise kind(taken) from None
            time.sleep(0.02)
    os.register_at_fork(after_in_child=partial(_close, weakref.ref(file)))
    return FolderLock(file, is_real)


def _close(lock_file: weakref.ref[files.File]) -> None:
    if (file := lock_file()) is not None:
        file.close()


def is_held(path: Path) -> bool | None:
    """Whether a process holds the lock file ``path``; None if the file system has none.

    The lock is taken for an instant, shared with other readers; who takes it alone waits so long.
    """
    try:
        with files.open_file(path, follow=False) as file:
            return None if not file.lock(shared=True) else False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None


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
            path = Path(f"/proc/self/fd/{self._descriptor}").readlink()
        except OSError:
            return None
        return path if self._is_at(path) else None

    def close(self) -> None:
        """Hold it no longer."""
        self._close()

    def _is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False


_PROCESSES = Path("/proc")
_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for the disk"}


class StallWatch:
    """Notices a process that hangs while it writes: how long the files in some folders have not
    changed. ``folders`` is called at each look."""

    def __init__(self, folders: Callable[[], Sequence[Path]]) -> None:
        self._folders = folders
        self._seen: object = None
        self._since = time.monotonic()

    def seconds(self) -> float:
        """Seconds since the last change that was seen."""
        now = time.monotonic()
        if (changes := [_changed(folder) for folder in self._folders()]) != self._seen:
            self._seen, self._since = changes, now
        return now - self._since


def _changed(folder: Path) -> tuple[int, int]:
    """The number of names below ``folder``, and the time of the latest change of a file. Folders
    may vanish meanwhile: whoever is watched renames and deletes them."""
    count, latest = 0, 0
    inside = (Path(at, name) for at, *names in os.walk(folder) for name in chain(*names))
    for path in (folder, *inside):
        with contextlib.suppress(OSError):
            count, latest = count + 1, max(latest, path.stat().st_mtime_ns)
    return count, latest


def process_with(path: Path) -> int | None:
    """The id of another process on this machine that has the file open; None if none is seen."""
    try:
        status = path.stat()
    except OSError:
        return None
    for process in _PROCESSES.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_other = int(process.name) != os.getpid()
            if is_other and any(_is_same(opened, status) for opened in (process / "fd").iterdir()):
                return int(process.name)
    return None


def _is_same(opened: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(opened.stat(), status)
    except OSError:
        return False


def state_of(pid: int) -> str:
    """Why the process does nothing, if the system knows it: stopped, or waiting for the disk."""
    try:
        text = (_PROCESSES / str(pid) / "stat").read_text()
    except OSError:
        return ""
    return _STATES.get(text.rpartition(")")[2].split()[0], "")
