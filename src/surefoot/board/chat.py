"""Conversations with models, each opened by a process of its own: ``surefoot chat PATH --json``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import RunError
from ..training.callbacks.training_process import PYTHON
from .run_state import parsed

MAX_MODELS = 2  # in memory at a time: two sides of one page
_LINE = 32 << 20  # bytes of an event
_SECONDS_TO_OPEN = 600.0


@dataclass
class OpenModel:
    """A process that has opened a model."""

    process: asyncio.subprocess.Process
    errors: bytearray = field(default_factory=bytearray)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    reader: asyncio.Task[None] | None = None
    is_ready: bool = False

    async def read(self) -> dict[str, object]:
        """The next event. Raises ``RunError`` if the process has ended."""
        assert self.process.stdout is not None
        try:
            line = await self.process.stdout.readline()
        except ValueError:
            raise RunError("the answer is too long") from None
        event = parsed(line)
        if event is None:
            await self.process.wait()
            if self.reader is not None:
                await self.reader
            said = self.errors.decode(errors="replace").strip()[-2000:]
            raise RunError(said or f"the process ended with {self.process.returncode}")
        return event

    async def close(self) -> None:
        """End the process."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()
        if self.reader is not None:
            await self.reader


@dataclass
class Conversations:
    """The models that are open; the one that was used least recently makes room for another."""

    root: Path
    _open: OrderedDict[str, OpenModel] = field(default_factory=OrderedDict)
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
                async for event in self._events(model, request):
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

    async def _events(
        self, model: OpenModel, request: Mapping[str, object]
    ) -> AsyncIterator[dict[str, object]]:
        if not model.is_ready:
            yield {"event": "opening"}
            async with asyncio.timeout(_SECONDS_TO_OPEN):
                first = await model.read()
            model.is_ready = True
            yield first
        assert model.process.stdin is not None
        model.process.stdin.write(json.dumps(request).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # the next line says why it has ended
            await model.process.stdin.drain()
        while True:
            event = await model.read()
            yield event
            if event.get("event") in ("answer", "error"):
                return

    async def _model(self, path: str) -> OpenModel:
        found = self._open.pop(path, None)
        if found is not None and found.process.returncode is not None:
            await found.close()
            found = None
        while found is None and len(self._open) >= MAX_MODELS:
            await self._drop(next(iter(self._open)))
        self._open[path] = found or await _opened(self.root, path)
        return self._open[path]

    async def _drop(self, path: str) -> None:
        found = self._open.pop(path, None)
        if found is not None:
            await found.close()


async def _opened(root: Path, path: str) -> OpenModel:
    process = await asyncio.create_subprocess_exec(
        *PYTHON,
        "chat",
        path,
        "--json",
        cwd=root,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        limit=_LINE,
    )
    model = OpenModel(process)
    model.reader = asyncio.create_task(_keep_errors(model))
    return model


async def _keep_errors(model: OpenModel) -> None:
    assert model.process.stderr is not None
    while block := await model.process.stderr.read(1 << 14):
        model.errors += block
        del model.errors[:-20_000]
