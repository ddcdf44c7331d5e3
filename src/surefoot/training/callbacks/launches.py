"""The launches of a run: who trains it, how far it is, and how each launch ended; how one is
started as a process of its own, and how another process follows what it writes, without secrets.

launches.jsonl    appended: one line when a launch begins, one with its surroundings, one for each
                  log, one for each slow rank, one when it ends
.heartbeat.json   replaced about every second: the step, and the process that takes it
.stop             created by whoever wants the run to stop; removed by the launch that does so

A launch that was killed has no end. Nothing here is needed for a resume. No torch, so that a reader
starts at once.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import json_lines
from ...errors import RunError
from ...parallel.progress import Progress
from ...storage.child import BEGAN
from ...storage.files import (
    File,
    append_line,
    exists,
    open_inside,
    open_log,
    parse_json,
    raising,
    read_inside,
    write_aside,
)
from ...terminal_text import plain

NAME = "launches.jsonl"
HEARTBEAT = ".heartbeat.json"  # hidden: not uploaded with a run in an object store
STOP = ".stop"
INTERVAL = 1.0  # seconds between heartbeats, and between two looks for STOP
_LAST = 1 << 14  # bytes that hold the last two lines of NAME
_OF_DEATH = ("time", "began", "step", "seconds")  # of a heartbeat, once it is the last one
MAX_LINE = 2000  # characters of an error or of a command


@dataclass
class LaunchFiles:
    """Writes both files of one launch. A disk that cannot hold them does not stop a run."""

    folder: Path
    began: float = field(default_factory=time.time)
    progress: Progress | None = None  # of the rank, from some time after it began
    _beat: float = field(default=0.0, init=False)
    _before: float = field(default=0.0, init=False)  # seconds until there was progress

    def __post_init__(self) -> None:
        self._before = time.time() - self.began
        if self.progress is not None:
            self._before -= sum(self.progress.seconds.values())

    def announce(self, pid: int) -> None:
        """Another process was started that will begin the launch, or fail before it does."""
        self._append("start", host=socket.gethostname(), pid=pid, pid_started=started(pid))

    def begin(self, command: str | None = None, **facts: object) -> None:
        """The launch has the run's lock. ``command`` is what a person would type to repeat it."""
        self._record_death()
        command = (command or " ".join(sys.argv))[:MAX_LINE]
        record = {"began": self.began, "command": command, "cwd": str(Path.cwd()), **facts}
        self._append("launch", **process(), **record)
        self.beat(0, None, is_due=True)

    def beat(
        self, step: int, max_steps: int | None, *, is_due: bool = False, **facts: object
    ) -> bool:
        """The launch is at ``step``; written if the last time is long enough ago. Returns whether
        it was."""
        now = time.time()
        if not is_due and 0 <= now - self._beat < INTERVAL:
            return False
        self._beat = now
        heartbeat = {"time": now, "began": self.began, "step": step, "max_steps": max_steps}
        heartbeat |= self._spent()
        path = self.folder / HEARTBEAT
        aside = path.with_name(f"{HEARTBEAT}.{os.getpid()}")
        with suppress(OSError):
            with open_log(aside, is_empty=True) as file:
                file.write(json.dumps({**heartbeat, **process(), **facts}).encode())
            aside.replace(path)
        return True

    def surroundings(self, **facts: object) -> None:
        """What the bits of the launch depend on, once its data and model are open."""
        self._append("surroundings", **facts)

    def log(self, **facts: object) -> None:
        """What a log has of this machine: memory, and time lost to saves."""
        self._append("log", **facts, **self._spent())

    def slow_rank(self, **facts: object) -> None:
        """The other ranks wait for one: which, and what for."""
        self._append("slow_rank", **facts)

    def end(self, outcome: str, **facts: object) -> None:
        """The launch ends: ``complete``, ``stopped`` by a signal, or ``failed``."""
        self._append("end", outcome=outcome, **facts, **self._spent())

    def _spent(self) -> dict[str, Any]:
        if self.progress is None:
            return {}
        seconds = {part: round(value, 6) for part, value in self.progress.seconds.items()}
        return {"seconds": {**seconds, "starting": seconds.get("starting", 0.0) + self._before}}

    def _record_death(self) -> None:
        """Record the last heartbeat of a launch that was killed, which this one replaces: until
        then it lived, and so far it came."""
        with suppress(OSError, ValueError), open_inside(self.folder, NAME) as file:
            start = max(0, file.size - _LAST)
            lines = file.read(start, file.size - start).splitlines()
            rows = [row for line in lines[-2:] if isinstance(row := parse_json(line), dict)]
            events = [row.get("event") for row in rows if row.get("event") != "start"]
            beat = last_heartbeat(self.folder)
            if beat and events and events[-1] != "end":
                facts = {name: beat[name] for name in _OF_DEATH if name in beat}
                append_line(self.folder / NAME, json.dumps({"event": "heartbeat", **facts}))

    def _append(self, event: str, **facts: object) -> None:
        line = json.dumps({"event": event, "time": time.time(), **facts})
        with suppress(OSError):  # lines of a launch are flushed with each save
            append_line(self.folder / NAME, line, is_durable=event in ("launch", "end"))


def request_stop(folder: Path) -> None:
    """Let the launch that trains in ``folder`` stop as at Ctrl-C, wherever it runs. Raises
    ``RunError``."""
    with raising(RunError, "the run is not stopped"):
        write_aside(folder / STOP, b"")


def forget_stop_request(folder: Path) -> None:
    """Remove a request that an earlier launch has not taken. Raises ``RunError`` if it stays: each
    launch would stop at its first step."""
    try:
        (folder / STOP).unlink(missing_ok=True)
    except OSError as error:
        raise RunError(
            f"{folder / STOP}: a request to stop that cannot be removed ({error.strerror}); remove "
            "it, then run the same command"
        ) from None


def take_stop_request(folder: Path) -> bool:
    """Whether the launch is to stop; removes the request."""
    with suppress(OSError):
        if exists(folder / STOP):
            with suppress(OSError):  # of a folder in which only others may delete
                (folder / STOP).unlink()
            return True
    return False


def last_heartbeat(folder: Path) -> dict[str, Any]:
    """The heartbeat of the last launch; empty if there is none."""
    try:
        beat = parse_json(read_inside(folder, HEARTBEAT, 1 << 16))
    except (OSError, ValueError):
        return {}
    return beat if isinstance(beat, dict) else {}


def process() -> dict[str, object]:
    """This process, so that another one with its number is not taken for it."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "pid_started": started(pid)}


def process_began() -> float:
    """When this process was started, or the imports for a fork, in seconds since 1970; now, if the
    system does not say."""
    seconds, _, pid = os.environ.get(BEGAN, "").partition(" ")
    if pid == str(os.getpid()):
        return float(seconds)
    try:
        stat = Path("/proc/self/stat").read_text()
        age = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError):
        return time.time()
    ticks = int(stat.rpartition(")")[2].split()[19])
    return time.time() - (age - ticks / os.sysconf("SC_CLK_TCK"))


def started(pid: int) -> str | None:
    """When a process of this machine started, by the kernel's clock; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return f"{boot}/{fields[19]}" if fields[0] not in ("Z", "X") else None


def is_alive(heartbeat: Mapping[str, object]) -> bool | None:
    """Whether the process in a heartbeat or launch still runs; None if that is not known here."""
    pid, since = heartbeat.get("pid"), heartbeat.get("pid_started")
    if heartbeat.get("host") != socket.gethostname() or not isinstance(pid, int) or since is None:
        return None
    return started(pid) == since


LOG = "train.log"  # its output, in the folder of the run
PYTHON = (sys.executable, "-P", "-m", "surefoot")


def shown(arguments: Sequence[str]) -> str:
    """A command as one types it."""
    return f"surefoot {shlex.join(arguments)}"


def start_training(
    folder: Path,
    arguments: Sequence[str],
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``surefoot`` with ``arguments``, which trains in ``folder``. It gets this process's
    environment and ``environment``; its log is text, for people. Raises ``RunError``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open_log(folder / LOG) as log:
            log.write(f"$ {shown(arguments)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                [*PYTHON, *arguments],
                cwd=cwd,
                env={**os.environ, json_lines.VARIABLE: "text", **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except OSError as error:
        raise RunError(f"{folder}: cannot start training: {error.strerror}") from None
    LaunchFiles(folder).announce(process.pid)
    return process


BLOCK = 1 << 22  # bytes read at a time
_LONGEST = 1 << 28  # bytes of a line
_PROOF = 256  # bytes before the position that must still be the same


@dataclass
class Follower:
    """Reads the whole lines that were appended to a file since the last time."""

    path: Path
    position: int = 0
    proof: bytes = b""  # what must still be before the position
    _stamp: tuple[int, int, int] = (0, 0, 0)

    def read(self) -> tuple[list[bytes], bool]:
        """The new lines, and whether the file was cut or replaced, so that these are all lines."""
        lines: list[bytes] = []
        is_other = False
        for block, is_new_file in self.blocks():
            is_other |= is_new_file
            lines += block.split(b"\n")[:-1]
        return lines, is_other

    def blocks(self) -> Iterator[tuple[bytes, bool]]:
        """The same as blocks of whole lines; the first one has whether it begins another file."""
        try:
            with open_inside(self.path.parent, self.path.name) as file:
                if (stamp := file.stamp) == self._stamp:
                    return
                start = self.position - len(self.proof)
                is_other = file.read_up_to(start, len(self.proof)) != self.proof
                if is_other:
                    self.position, self.proof = 0, b""
                self._stamp = stamp
                yield b"", is_other
                yield from ((block, False) for block in self._blocks(file))
        except OSError:
            was_there = self.position > 0
            self.position, self.proof, self._stamp = 0, b"", (0, 0, 0)
            yield b"", was_there

    def _blocks(self, file: File) -> Iterator[bytes]:
        size = BLOCK
        while data := file.read_up_to(self.position, size):
            whole = data.rfind(b"\n") + 1
            if not whole and len(data) == size < _LONGEST:
                size *= 2
                continue
            if not whole:  # an incomplete line, still being written
                break
            self.position += whole
            self.proof = (self.proof + data[max(0, whole - _PROOF) : whole])[-_PROOF:]
            yield data[:whole]
            if len(data) < size:
                break


def record(line: bytes) -> dict[str, object] | None:
    """The record in a line, fit to be shown; None if it is none."""
    try:
        row = plain(parse_json(line))
    except ValueError:
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


# Secrets are kept out of what is logged, and out of the settings that a tracker shows.
_USERINFO = re.compile(r"(?<=://)[^/\s@'\"]+@")
_QUERY = re.compile(
    r"([?&][^=&\s'\"]*(?:key|token|secret|password|sig|auth)[^=&\s'\"]*=)[^&\s'\"]+", re.I
)
_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|WEBHOOK|CREDENTIAL", re.I)
_SHORTEST = 8  # characters of a value that cannot be an ordinary word of a message


def redacted(text: str) -> str:
    """``text`` without the values of environment variables that are named like secrets, and
    without names, passwords and keys in URLs."""
    secrets = {value for name, value in os.environ.items() if _NAMES.search(name)}
    for secret in sorted((s for s in secrets if len(s) >= _SHORTEST), key=len, reverse=True):
        text = text.replace(secret, "***")
    return _QUERY.sub(r"\1***", _USERINFO.sub("***@", text))
