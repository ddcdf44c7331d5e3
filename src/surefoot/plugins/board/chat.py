"""Conversations with models, each opened by a process of its own: ``surefoot chat PATH --json``."""

from __future__ import annotations

import asyncio
import contextlib
import json
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import RunError
from .processes import ended, started
from .run_state import parsed

MAX_MODELS = 2  # in memory at a time: two sides of one page
_LINE = 32 << 20  # bytes of an event
_ERRORS = 20_000  # bytes, from their end
_SECONDS_TO_OPEN = 600.0


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
            raise RunError("the answer is too long") from None
        event = parsed(line)
        if event is None:
            await self.process.wait()
            await self._reader
            said = self.errors.decode(errors="replace").strip()[-2000:]
            raise RunError(said or f"the process ended with {self.process.returncode}")
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
