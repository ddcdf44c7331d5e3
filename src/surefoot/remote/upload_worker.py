"""Upload worker: a separate process, or a thread for the in-memory store."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import surefoot

from ..errors import CheckpointError
from ..storage.address import Address
from .store import Store
from .uploader import Uploader

Task = Mapping[str, object]
Answer = dict[str, Any]


class UploadWorker(Protocol):
    """Does one task at a time, in the background."""

    def start(self, task: Task) -> None:
        """Begin."""

    def answer(self, *, wait: bool) -> Answer | None:
        """The result of the task; None if it is not done and ``wait`` is false."""

    def close(self, *, wait: bool) -> None:
        """End it once it has done its tasks."""


def hand(address: Address, folder: Path, seconds: float) -> UploadWorker:
    """The worker for the store: ``memory://`` exists only inside this process."""
    if address.scheme == "memory":
        return _Thread(Uploader(Store(address, seconds=seconds), folder))
    return _Process(address, folder, seconds)


class _Thread:
    def __init__(self, uploader: Uploader) -> None:
        self._uploader = uploader
        self._pool = ThreadPoolExecutor(1)
        self._running: Future[Answer] | None = None

    def start(self, task: Task) -> None:
        self._running = self._pool.submit(self._uploader.serve, task)

    def answer(self, *, wait: bool) -> Answer | None:
        if self._running is None or not (wait or self._running.done()):
            return None
        return self._running.result()

    def close(self, *, wait: bool) -> None:
        self._pool.shutdown(wait=wait)


class _Process:
    def __init__(self, address: Address, folder: Path, seconds: float) -> None:
        self._arguments = (str(address), str(folder.absolute()), str(seconds))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, task: Task) -> None:
        if self._process is not None and self._process.poll() is not None:
            self.close(wait=True)  # it was killed
        if self._process is None:
            self._process = _launch(self._arguments)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # told by the answer that does not come
            self._process.stdin.write(json.dumps(task).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, *, wait: bool) -> Answer | None:
        process = self._process
        if process is None or process.stdout is None:
            return None
        if not wait and not select.select([process.stdout], [], [], 0)[0]:
            return None
        line = process.stdout.readline()
        if line.endswith(b"\n"):
            told: Answer = json.loads(line)
            return told
        code = process.wait()
        how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        return {"error": f"the process that uploads was ended {how}"}

    def close(self, *, wait: bool) -> None:
        if self._process is not None and self._process.stdin and self._process.stdout:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            if wait:
                self._process.wait()
            self._process.stdout.close()
            self._process = None


def _launch(arguments: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """The process; `-P` and the path make it import this very package and nothing else."""
    home = str(Path(surefoot.__file__).parent.parent)
    known = os.environ.get("PYTHONPATH")
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "surefoot.remote.uploader", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([home, known] if known else [home])},
        )
    except OSError as error:
        raise CheckpointError(f"cannot start the uploader process: {error}") from error
