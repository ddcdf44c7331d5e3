"""Commands of the command line as child processes: short ones with an answer, conversations with
models (``surefoot chat PATH --json``), and training.

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
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import RunError
from ...training.callbacks.launches import PYTHON, is_alive, shown, start_training
from .run_state import RunState, is_locked, parsed, state_of

MAX_MODELS = 2  # in memory at a time: two sides of one page
_LINE = 32 << 20  # bytes of an event
_ERRORS = 20_000  # bytes, from their end
_SECONDS_TO_OPEN = 600.0
_MAX_RUNNING = 4
_MAX_KEPT = 50
_SECONDS = 1800.0
_SHOWN = 20_000  # characters of an output, from its end


async def started(root: Path, *arguments: str, stdin: int, limit: int = 1 << 16) -> Process:
    """A command in ROOT, in a session of its own. Lines of its output have at most ``limit``
    bytes."""
    return await asyncio.create_subprocess_exec(
        *(*PYTHON, *arguments),
        cwd=root,
        stdin=stdin,
        stdout=PIPE,
        stderr=PIPE,
        start_new_session=True,
        limit=limit,
    )


async def ended(process: Process) -> None:
    """End a process, and those that it has started."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            # The group has the number of the process, as `started` gives it a session.
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


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
    task: asyncio.Task[None] = field(init=False)

    async def run(self, root: Path) -> None:
        """Run it to its end."""
        process = await started(root, *self.arguments, stdin=subprocess.DEVNULL)
        code = -1  # cancelled
        try:
            async with asyncio.timeout(_SECONDS):
                output, error = await process.communicate()
            code = process.returncode or 0
            self.output, self.error = (text.decode(errors="replace") for text in (output, error))
        except TimeoutError:
            self.error, code = f"took more than {_SECONDS:.0f} s", 124
        finally:
            await ended(process)
            self.code = code

    async def cancel(self) -> None:
        """End it."""
        if not self.task.done():
            self.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.task

    def as_data(self) -> dict[str, object]:
        """For a browser: the output as JSON if it is some."""
        answer: dict[str, object] = {"job": self.number, "command": shown(self.typed)}
        answer["code"] = self.code
        if self.code is None:
            return answer | {"seconds": time.time() - self.began}
        try:
            result = json.loads(self.output) if self.output.strip() else None
        except ValueError:
            result = None
        text = "" if result is not None else self._as_typed(self.output)
        return answer | {"result": result, "output": text, "error": self._as_typed(self.error)}

    def _as_typed(self, text: str) -> str:
        """The end of a text, which names files as they were typed."""
        for word, typed in zip(self.arguments, self.typed, strict=False):
            if word != typed:
                text = text.replace(word, typed)
        return text[-_SHOWN:]


@dataclass
class ChildCommands:
    """The commands that this board has started."""

    root: Path
    _jobs: dict[int, ShortCommand] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _training: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *arguments: str, typed: Sequence[str] = ()) -> ShortCommand:
        """Start a command in ROOT. Raises ``RunError`` if too many run."""
        if sum(job.code is None for job in self._jobs.values()) >= _MAX_RUNNING:
            raise RunError(f"{_MAX_RUNNING} commands are running already; wait for one of them")
        for number in [n for n, job in self._jobs.items() if job.code is not None][:-_MAX_KEPT]:
            del self._jobs[number]
        job = ShortCommand(next(self._numbers), arguments, typed or arguments)
        self._jobs[job.number] = job
        job.task = asyncio.create_task(job.run(self.root))
        return job

    def find(self, number: int) -> ShortCommand:
        """A command by its number. Raises ``RunError``."""
        if number not in self._jobs:
            raise RunError("this command is not known (any more)")
        return self._jobs[number]

    async def close(self) -> None:
        """End the short commands; training continues."""
        for job in self._jobs.values():
            await job.cancel()

    def train(self, arguments: Sequence[str], folder: Path) -> int:
        """Start training in a session of its own; its output goes to ``folder``. Returns the number
        of the process. Raises ``RunError``."""
        # A run has no lock while it opens its model: a second click must not start it twice.
        if is_locked(folder) or state_of(folder).evidence == "starting":
            raise RunError(f"{folder}: a process is training there already")
        self.reap()
        process = start_training(folder, arguments, cwd=self.root)
        self._training.append(process)
        return process.pid

    def reap(self) -> list[int]:
        """Forget training processes that have ended; the numbers of those that run."""
        # poll() takes their exit codes, too; without it they would stay as zombies.
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
        cure = f"stop it where it was started, or with `surefoot stop {run}`"
        raise RunError(f"{run}: its process is {where}; {cure}")
    os.kill(pid, signal.SIGTERM)


@dataclass
class OpenModel:
    """A process that has opened a model, or is opening it."""

    process: Process
    errors: bytearray = field(default_factory=bytearray)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_ready: bool = False

    def __post_init__(self) -> None:
        self._reader = asyncio.create_task(self._keep_errors())

    async def read(self) -> dict[str, object]:
        """The next event. Raises ``RunError`` if the process has ended."""
        assert self.process.stdout is not None
        try:
            line = await self.process.stdout.readline()
        except ValueError:
            # asyncio's word for a line beyond the limit.
            raise RunError("the answer is too long") from None
        event = parsed(line)
        if event is None:
            await self.process.wait()
            await self._reader
            last_errors = self.errors.decode(errors="replace").strip()[-2000:]
            raise RunError(last_errors or f"the process ended with {self.process.returncode}")
        return event

    async def ask(self, request: Mapping[str, object]) -> AsyncIterator[dict[str, object]]:
        """Events of its answer."""
        if not self.is_ready:
            yield {"event": "opening"}
            async with asyncio.timeout(_SECONDS_TO_OPEN):
                first = await self.read()
            self.is_ready = True
            yield first
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # the next line says why it has ended
            await self.process.stdin.drain()
        is_over = False
        while not is_over:
            event = await self.read()
            yield event
            is_over = event.get("event") in ("answer", "error")

    async def close(self) -> None:
        """End the process."""
        await ended(self.process)
        await self._reader

    async def _keep_errors(self) -> None:
        assert self.process.stderr is not None
        # Read all the time: a full pipe would stop the process.
        while block := await self.process.stderr.read(1 << 14):
            self.errors += block
            del self.errors[:-_ERRORS]


@dataclass
class Conversations:
    """The models that are open; the one that was used least recently makes room for another."""

    root: Path
    _open: dict[str, OpenModel] = field(default_factory=dict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def answer(
        self, path: str, request: Mapping[str, object]
    ) -> AsyncIterator[dict[str, object]]:
        """Events of the answer of the model at ``path`` to a request; the last one is ``answer`` or
        ``error``."""
        try:
            async with self._lock:
                model = await self._model(path)
            async with model.lock:
                async for event in model.ask(request):
                    yield event
        except RunError as error:
            await self._drop(path)
            yield {"event": "error", "message": str(error)}
        except asyncio.CancelledError:  # the page was closed, and nobody reads the rest
            await self._drop(path)
            raise

    async def close(self) -> None:
        """Close all models."""
        for path in list(self._open):
            await self._drop(path)

    async def _model(self, path: str) -> OpenModel:
        if path in self._open and self._open[path].process.returncode is not None:
            await self._drop(path)
        # Put back at the end below, so that the first is the one used least recently.
        model = self._open.pop(path, None)
        while model is None and len(self._open) >= MAX_MODELS:
            await self._drop(next(iter(self._open)))
        if model is None:
            arguments = ("chat", path, "--json")
            model = OpenModel(await started(self.root, *arguments, stdin=PIPE, limit=_LINE))
        self._open[path] = model
        return model

    async def _drop(self, path: str) -> None:
        if (model := self._open.pop(path, None)) is not None:
            await model.close()
