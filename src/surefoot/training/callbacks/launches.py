"""The launches of a run: who trains it, how far it is, and how each launch ended.

launches.jsonl    appended: one line when a launch begins, one for each log, one when it ends
.heartbeat.json   replaced about every second: the step, and the process that takes it

A launch that was killed has no end. Nothing here is needed for a resume. No torch, so that a reader
starts at once.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ...storage.files import append_line

NAME = "launches.jsonl"
HEARTBEAT = ".heartbeat.json"  # hidden: not uploaded with a run in an object store
INTERVAL = 1.0  # seconds between heartbeats
MAX_LINE = 2000  # characters of an error or of a command


@dataclass
class LaunchFiles:
    """Writes both files of one launch. A disk that cannot hold them does not stop a run."""

    folder: Path
    began: float = field(default_factory=time.time)
    _beat: float = field(default=0.0, init=False)

    def announce(self, pid: int) -> None:
        """Another process was started that will begin the launch, or fail before it does."""
        self._append("start", host=socket.gethostname(), pid=pid, pid_started=started(pid))

    def begin(self, **facts: object) -> None:
        """The launch has the run's lock."""
        command = " ".join(sys.argv)[:MAX_LINE]
        self._append("launch", **process(), command=command, cwd=str(Path.cwd()), **facts)
        self.beat(0, None, is_due=True)

    def beat(
        self, step: int, max_steps: int | None, *, is_due: bool = False, **facts: object
    ) -> None:
        """The launch is at ``step``; written if the last time is long enough ago."""
        now = time.time()
        if not is_due and 0 <= now - self._beat < INTERVAL:
            return
        self._beat = now
        found = {"time": now, "began": self.began, "step": step, "max_steps": max_steps}
        path = self.folder / HEARTBEAT
        aside = path.with_name(f"{HEARTBEAT}.{os.getpid()}")
        with suppress(OSError):
            aside.write_text(json.dumps({**found, **process(), **facts}))
            aside.replace(path)

    def log(self, **facts: object) -> None:
        """What a log has of this machine: memory, and time lost to saves."""
        self._append("log", **facts)

    def end(self, outcome: str, **facts: object) -> None:
        """The launch ends: ``complete``, ``stopped`` by a signal, or ``failed``."""
        self._append("end", outcome=outcome, **facts)

    def _append(self, event: str, **facts: object) -> None:
        with suppress(OSError):
            append_line(
                self.folder / NAME, json.dumps({"event": event, "time": time.time(), **facts})
            )


def process() -> dict[str, object]:
    """This process, so that another one with its number is not taken for it."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "pid_started": started(pid)}


def started(pid: int) -> str | None:
    """When a process of this machine started, by the kernel's clock; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return f"{boot}/{fields[19]}" if fields[0] not in ("Z", "X") else None


def is_alive(found: Mapping[str, object]) -> bool | None:
    """Whether the process in a heartbeat or launch still runs; None if that is not known here."""
    pid, since = found.get("pid"), found.get("pid_started")
    if found.get("host") != socket.gethostname() or not isinstance(pid, int) or since is None:
        return None
    return started(pid) == since
