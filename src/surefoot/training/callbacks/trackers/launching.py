"""Start the process of a tracker, tell it of events, and end it in time. The run never waits for
it before its end."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ....errors import counted

logger = logging.getLogger(__name__)
FINISH = 30.0  # seconds at the end of a launch, for all trackers together
PATIENCE = 120.0  # seconds for one call of a tracker
_PACKAGE = Path(__file__).parents[3]


@dataclass
class TrackerProcess:
    """A tracker's process; ``None`` once it is gone."""

    name: str
    order: Mapping[str, object]
    environment: Mapping[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None
    _unread: bytes = b""

    def start(self) -> None:
        """Start it. A tracker that cannot be started is dropped."""
        code = f"import sys; sys.path.append({str(_PACKAGE)!r}); from {__package__} import worker"
        command = [sys.executable, "-P", "-c", f"{code}; worker.main()"]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **self.environment},
                start_new_session=True,  # Ctrl-C is for the run
            )
        except OSError as error:
            logger.warning("%s: cannot be started: %s", self.name, error)
            return
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        self.tell(tracker=self.name, finish=FINISH, patience=PATIENCE, **self.order)

    def tell(self, **event: object) -> None:
        """Send an event, without waiting."""
        if self._process is None or self._process.stdin is None:
            return
        line = json.dumps(event, default=str).encode() + b"\n"
        try:
            is_whole = os.write(self._process.stdin.fileno(), line) == len(line)
        except BlockingIOError:
            is_whole = False
        except OSError:  # it has ended, and says why
            return
        if not is_whole:
            self._drop("does not read what it is sent")

    def log_messages(self) -> None:
        """Log what it has said."""
        if self._process is None or self._process.stdout is None:
            return
        try:
            while data := os.read(self._process.stdout.fileno(), 1 << 16):
                self._unread += data
        except BlockingIOError:
            pass
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            said = json.loads(line)
            level = logging.WARNING if said["is_warning"] else logging.INFO
            logger.log(level, "%s: %s", self.name, said["text"])

    def is_ended(self) -> bool:
        """Whether it has done its work, all it said is logged, and nothing remains of it."""
        if self._process is None:
            return True
        code = self._process.poll()
        self.log_messages()
        if code is None:
            return False
        if code not in (0, 1):  # 1: it has said why
            logger.warning("%s: dropped: its process ended with %d", self.name, code)
        self._close()
        return True

    def give_up(self) -> None:
        """End it now."""
        if not self.is_ended():
            self._drop(f"not finished within {counted(round(FINISH), 'second')}")

    def _drop(self, why: str) -> None:
        logger.warning("%s: dropped: %s; metrics.jsonl has all figures", self.name, why)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._close()

    def _close(self) -> None:
        assert self._process is not None
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process = None


def finish(processes: list[TrackerProcess], **end: object) -> None:
    """Let all of them finish, for a bounded time together."""
    for one in processes:
        one.tell(event="end", **end)
    deadline = time.monotonic() + FINISH
    try:
        while not all(one.is_ended() for one in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:  # also if the user does not wait
        for one in processes:
            one.give_up()
