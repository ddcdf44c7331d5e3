"""Notice a process that hangs while it writes: which one it is, and since when nothing changed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

_PROCESSES = Path("/proc")
_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for the disk"}


class StallWatch:
    """How long the files in some folders have not changed. ``folders`` is called at each look."""

    def __init__(self, folders: Callable[[], Sequence[Path]]) -> None:
        self._folders = folders
        self._seen: object = None
        self._since = time.monotonic()

    def seconds(self) -> float:
        """Seconds since the last change that was seen."""
        now = time.monotonic()
        if (found := [_changed(folder) for folder in self._folders()]) != self._seen:
            self._seen, self._since = found, now
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
        wanted = path.stat()
    except OSError:
        return None
    for process in _PROCESSES.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_other = int(process.name) != os.getpid()
            if is_other and any(_is_same(opened, wanted) for opened in (process / "fd").iterdir()):
                return int(process.name)
    return None


def _is_same(opened: Path, wanted: os.stat_result) -> bool:
    try:
        return os.path.samestat(opened.stat(), wanted)
    except OSError:
        return False


def state_of(pid: int) -> str:
    """Why the process does nothing, if the system knows it: stopped, or waiting for the disk."""
    try:
        text = (_PROCESSES / str(pid) / "stat").read_text()
    except OSError:
        return ""
    return _STATES.get(text.rpartition(")")[2].split()[0], "")
