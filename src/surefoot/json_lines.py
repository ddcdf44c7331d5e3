"""Messages as JSON lines, for log collectors: one object a line, whoever has written it.

``Formatter`` makes an object of each log record. What else reaches standard output or standard
error (a reward's ``print``, NCCL, the stack of a crash) passes through a process of its own, which
reads both as pipes and turns every other line into an object, too: so native code, child processes
and ranks are included, and a process that is killed leaves no half of an object behind.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import logging
import math
import os
import selectors
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

VARIABLE = "SUREFOOT_LOG_FORMAT"
_PIPE = "SUREFOOT_LOG_PIPE"  # the pipe that is standard error of this process and of its children
_KEYS = {"time", "level", "message"}  # what every line has
_PREFIXES = {"error:": "error", "warning:": "warning"}
_STREAMS = {1: "stdout", 2: "stderr"}
_LONGEST = 1 << 20  # bytes without a newline
_SECONDS_TO_END = 5.0  # for the last lines; a process that this one has left behind may write more


def is_on() -> bool:
    """Whether messages of this process are JSON lines."""
    return os.environ.get(VARIABLE) == "json"


def json_line(level: str, message: str, seconds: float | None = None, **fields: object) -> str:
    """One message, in ASCII. ``seconds``: when, since 1970; None is now."""
    now = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    time = now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps({"time": time, "level": level, "message": message, **fields}, default=str)


class Formatter(logging.Formatter):
    """Log records as JSON lines. The ``fields`` of a record, such as a step and its loss, are
    fields of the object; numbers that are NaN or infinite are text, since JSON has none."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of ``record``, without its end."""
        more = dict[str, object]()
        for name, value in getattr(record, "fields", {}).items():
            is_odd = isinstance(value, float) and not math.isfinite(value)
            more[name] = str(value) if is_odd else value
        if rank := os.environ.get("RANK"):
            more["rank"] = int(rank)
        if record.exc_info:
            more["exception"] = self.formatException(record.exc_info)
        level, text = record.levelname.lower(), record.getMessage()
        return json_line(level, text, record.created, logger=record.name, **more)


def start(descriptors: Sequence[int]) -> None:
    """From now on, what this process and its children write to ``descriptors`` (of 1 and 2) leaves
    as JSON lines, and nothing is shown that only a terminal can show. Raises ``OSError``."""
    os.environ |= {VARIABLE: "json", "TTY_COMPATIBLE": "0", "TQDM_DISABLE": "1"}
    os.environ.pop("FORCE_COLOR", None)
    if 1 in descriptors and os.isatty(0):  # a question would wait for an answer, and not be seen
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # in order with standard error
    if os.environ.get(_PIPE) == _identity(2):
        return  # the process that has started this one has done the rest
    pipes = {number: os.pipe() for number in descriptors}
    outputs = {number: os.dup(number) for number in descriptors}
    process = subprocess.Popen(
        [
            *(sys.executable, "-P", "-S", __file__),
            *(f"{number},{pipes[number][0]},{outputs[number]}" for number in descriptors),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[*(ends[0] for ends in pipes.values()), *outputs.values()],
        start_new_session=True,  # Ctrl-C is not for it: it ends with the last line
    )
    for number, ends in pipes.items():
        os.dup2(ends[1], number)
        for descriptor in (*ends, outputs[number]):
            os.close(descriptor)
    os.environ[_PIPE] = _identity(2)
    atexit.register(_end, process, tuple(descriptors))


def _identity(descriptor: int) -> str:
    status = os.fstat(descriptor)
    return f"{status.st_dev}:{status.st_ino}"


def _end(process: subprocess.Popen[bytes], descriptors: Sequence[int]) -> None:
    """Wait for the last lines: a container ends with its first process."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    for number in descriptors:
        os.dup2(nowhere, number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_SECONDS_TO_END)


def as_json(line: bytes, stream: str) -> str:
    """What leaves for a line that came in; of a blank one, nothing."""
    text = line.decode(errors="replace").strip("\r\n").rpartition("\r")[2]
    if not text.strip():
        return ""
    if text.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            if json.loads(text, parse_constant=int).keys() >= _KEYS:  # NaN is a ValueError
                return f"{text}\n"
    level = _PREFIXES.get(text.partition(" ")[0], "info")
    return json_line(level, text, stream=stream) + "\n"


def _main(words: Sequence[str]) -> None:
    """Serve until nobody has the pipes any more. A collector that is gone stops nobody who writes:
    then lines are read, and lost."""
    selector = selectors.DefaultSelector()
    for word in words:
        number, pipe, output = map(int, word.split(","))
        selector.register(pipe, selectors.EVENT_READ, (_STREAMS[number], output))
    unread = dict.fromkeys(selector.get_map(), b"")
    while selector.get_map():
        for key, _ in selector.select():
            stream, output = key.data
            part = os.read(key.fd, 1 << 16)
            *lines, unread[key.fd] = (unread[key.fd] + part).split(b"\n")
            if not part or len(unread[key.fd]) > _LONGEST:
                lines.append(unread[key.fd])
                unread[key.fd] = b""
            left = memoryview("".join(as_json(line, stream) for line in lines).encode())
            with contextlib.suppress(OSError):
                while left:
                    left = left[os.write(output, left) :]
            if not part:
                selector.unregister(key.fd)


if __name__ == "__main__":
    _main(sys.argv[1:])
