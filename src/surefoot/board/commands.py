"""ChildCommands of the command line as child processes: short ones with an answer, and training.

A short command is ended with the board. Training is in a session of its own: closing the page or
the board changes nothing, and what is known of it is in the files of its run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import RunError
from ..training.callbacks.launches import is_alive
from ..training.callbacks.training_process import PYTHON, shown, start_training
from .run_state import RunState, is_locked, state_of

MAX_OUTPUT = 32 << 20  # bytes of standard output
MAX_RUNNING = 4
MAX_KEPT = 50
SECONDS = 1800.0


@dataclass
class ShortCommand:
    """One command: running, or with its exit code and output."""

    number: int
    arguments: Sequence[str]
    typed: Sequence[str]  # the same, as a person would call it
    began: float = field(default_factory=time.time)
    code: int | None = None
    output: str = ""
    error: str = ""
    task: asyncio.Task[None] | None = None

    @property
    def command(self) -> str:
        """What does the same in a terminal."""
        return shown(self.typed)

    def as_data(self) -> dict[str, object]:
        """For a browser: the output as JSON if it is some."""
        seconds = time.time() - self.began
        found: dict[str, object] = {"job": self.number, "command": self.command, "code": self.code}
        if self.code is None:
            return found | {"seconds": seconds}
        try:
            result = json.loads(self.output) if self.output.strip() else None
        except ValueError:
            result = None
        text = "" if result is not None else self._as_typed(self.output)
        return found | {"result": result, "output": text, "error": self._as_typed(self.error)}

    def _as_typed(self, text: str) -> str:
        """The end of a text, which names files as they were typed."""
        for word, typed in zip(self.arguments, self.typed, strict=False):
            if word != typed:
                text = text.replace(word, typed)
        return text[-20_000:]


@dataclass
class ChildCommands:
    """The commands that this board has started."""

    root: Path
    _jobs: dict[int, ShortCommand] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _training: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *arguments: str, typed: Sequence[str] = ()) -> ShortCommand:
        """Start a command in ROOT. Raises ``RunError`` if too many run."""
        if sum(job.code is None for job in self._jobs.values()) >= MAX_RUNNING:
            raise RunError(f"{MAX_RUNNING} commands are running already; wait for one of them")
        for number in [n for n, job in self._jobs.items() if job.code is not None][:-MAX_KEPT]:
            del self._jobs[number]
        job = ShortCommand(next(self._numbers), arguments, typed or arguments)
        self._jobs[job.number] = job
        job.task = asyncio.create_task(_run(job, self.root))
        return job

    def find(self, number: int) -> ShortCommand:
        """A command by its number. Raises ``RunError``."""
        if number not in self._jobs:
            raise RunError("this command is not known (any more)")
        return self._jobs[number]

    async def cancel(self, job: ShortCommand) -> None:
        """End a command."""
        if job.task is not None and not job.task.done():
            job.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await job.task

    async def close(self) -> None:
        """End the short commands; training continues."""
        for job in self._jobs.values():
            await self.cancel(job)

    def train(self, arguments: Sequence[str], folder: Path) -> int:
        """Start training in a session of its own; its output goes to ``folder``. Returns the number
        of the process. Raises ``RunError``."""
        if is_locked(folder) or state_of(folder).evidence == "starting":
            raise RunError(f"{folder}: a process is training there already")
        self.reap()
        process = start_training(folder, arguments, cwd=self.root)
        self._training.append(process)
        return process.pid

    def reap(self) -> list[int]:
        """Forget training processes that have ended; the numbers of those that run."""
        self._training = [process for process in self._training if process.poll() is None]
        return [process.pid for process in self._training]


def stop(run: str, state: RunState) -> None:
    """Let the training of ``run`` finish its step, save and exit. Raises ``RunError``."""
    process = state.process or {}
    pid, is_here = process.get("pid"), is_alive(process)
    if state.name != "running":
        raise RunError(f"{run}: no process is training there")
    if not is_here or not isinstance(pid, int):
        where = f"on {process['host']}" if is_here is None and "host" in process else "not known"
        raise RunError(f"{run}: its process is {where}; stop it where it was started")
    os.kill(pid, signal.SIGTERM)


async def _run(job: ShortCommand, root: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *PYTHON,
        *job.arguments,
        cwd=root,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(SECONDS):
            output, error = await asyncio.gather(_read(process.stdout), _read(process.stderr))
            code = await process.wait()
    except TimeoutError:
        output, error, code = b"", f"took more than {SECONDS:.0f} s".encode(), 124
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        job.code = -1 if job.code is None else job.code
    job.output, job.error = output.decode(errors="replace"), error.decode(errors="replace")
    job.code = code


async def _read(stream: asyncio.StreamReader) -> bytes:
    found = bytearray()
    while block := await stream.read(1 << 16):
        if len(found) < MAX_OUTPUT:
            found += block
    return bytes(found)
