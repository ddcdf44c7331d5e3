"""Remote mirror: keeps the store's copy of a run up to date while it trains.

At most one upload is in flight. The latest checkpoint is always uploaded next. An older one that
had to wait is uploaded when there is no later one, if the retention policy has kept it. Errors
never stop training: they are logged, and the upload is retried with the next save. Only the end of
the run waits for all uploads. A process of its own uploads, or a thread for the in-memory store.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import surefoot

from ...checkpoint.disk.commit import committed, step_of
from ...errors import CheckpointError, LostPeerError
from ...storage.address import Address
from .store import Store, readable
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
            [sys.executable, "-P", "-m", f"{__package__}.uploader", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([home, known] if known else [home])},
        )
    except OSError as error:
        raise CheckpointError(f"cannot start the uploader process: {error}") from error


logger = logging.getLogger(__name__)


class Mirror:
    """Uploads the checkpoints of ``folder`` to ``store``, and deletes there what the run deletes.

    A listener of the saver (``SaveListener``), and a context manager: at its end, unless the run
    failed, it waits until everything is uploaded.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        *,
        there: Iterable[int] = (),
        damaged: Iterable[int] = (),
        seconds: float = 600,
    ) -> None:
        self.address = store.address
        self._folder = folder
        self._there = set(there)  # steps that exist in the store
        self._damaged = set(damaged) - self._there  # steps whose place may be taken there
        self._failed: dict[int, str] = {}  # steps that could not be uploaded, and why, until a save
        self._let_go: set[int] = set()  # steps to delete in the store
        self._released: set[int] = set()  # steps that nobody wants any more
        self._going: set[int] = set()  # steps that are about to be dropped here
        self._in_flight: int | None = None
        self._is_busy = False
        self._seconds = seconds
        self._hand: UploadWorker | None = None

    def __enter__(self) -> Mirror:
        self._start()  # what an earlier start of the run could not upload
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            is_lost = isinstance(error, LostPeerError)  # a run that starts again must not wait
            if error is None or (isinstance(error, Exception) and not is_lost):
                self.finish()
        except CheckpointError as failure:
            if error is None:
                raise
            logger.error("%s", failure)
        finally:
            if self._hand is not None:
                self._hand.close(wait=not self._is_busy)

    @property
    def steps(self) -> frozenset[int]:
        """The steps that exist in the store, as far as is known."""
        return frozenset(self._there)

    @property
    def protected(self) -> set[int]:
        """Steps whose local copies are needed: in flight, or next and later than all uploaded."""
        waiting = self._next()
        is_ahead = waiting is not None and waiting > max(self._there, default=-1)
        steps = {self._in_flight, waiting if is_ahead else None}
        return {step for step in steps if step is not None}

    def on_save(self, replaces: Iterable[str]) -> None:
        """Do not start to upload checkpoints that are about to be deleted in ``folder``."""
        self._going = set(map(_step, replaces))

    def on_committed(self, path: Path, replaces: Iterable[str]) -> None:
        """Upload ``path``, and delete in the store the checkpoints that it ``replaces``."""
        self._failed.clear()
        for step in sorted(set(map(_step, replaces)) - self._there - {self._in_flight}):
            logger.info(
                "checkpoint-%d was not uploaded: a newer checkpoint was uploaded first, and "
                "the retention policy has deleted this one",
                step,
            )
        self.on_deleted(replaces)
        self._released.discard(step_of(path))
        self.on_poll()
        if not self._is_busy:
            self._start()
        elif self._in_flight is not None and self._in_flight < step_of(path):
            logger.info(
                "upload of %s queued: checkpoint-%d is still being uploaded to %s",
                path.name,
                self._in_flight,
                self.address,
            )

    def on_deleted(self, names: Iterable[str]) -> None:
        """Delete these in the store too, as soon as a later one is there."""
        steps = set(map(_step, names))
        self._going = steps
        uploaded = {step for step in steps if step in self._there or step == self._in_flight}
        self._let_go |= uploaded
        self._released |= steps

    def on_poll(self) -> None:
        """If the upload in flight has ended, store its outcome and start the next."""
        if self._is_busy and self._hand is not None:
            answer = self._hand.answer(wait=False)
            if answer is not None:
                self._note(answer)
                self._start()

    def finish(self) -> None:
        """Wait until everything is uploaded; a ``CheckpointError`` if it could not be."""
        self._failed.clear()
        self._going.clear()  # no save is on its way any more that would drop them
        self._wait()
        if not self._failed:
            self._start(run_files=True)
            self._wait()
        if self._failed:
            reason = self._failed[max(self._failed)]
            raise CheckpointError(
                f"not everything could be uploaded to {self.address}: {reason}. The local copy "
                f"is in {self._folder}; start the same command again to upload what is missing"
            )

    def _wait(self) -> None:
        """Wait until there is nothing left to do, or something failed."""
        if not self._is_busy:
            self._start()
        while self._is_busy and self._hand is not None:
            if self._in_flight is not None:
                logger.info(
                    "waiting for the upload of checkpoint-%d to %s", self._in_flight, self.address
                )
            answer = self._hand.answer(wait=True)
            assert answer is not None
            self._note(answer)
            if not self._failed:
                self._start()

    def _next(self) -> int | None:
        """The latest checkpoint that is local, not in the store, and may be uploaded."""
        here = {step_of(path) for path in committed(self._folder)}
        gone = {self._in_flight, *self._there, *self._failed, *self._going, *self._released}
        return max(here - gone, default=None)

    def _start(self, *, run_files: bool = False) -> None:
        """Give the upload worker its next task, if there is one."""
        step = self._next()
        # a step is deleted there once a newer one exists, so that there is always one
        newest = max(self._there | ({step} if step is not None else set()), default=-1)
        forget = sorted(old for old in self._let_go & self._there if old < newest)
        if step is None and not forget and not run_files:
            return
        if self._hand is None:
            self._hand = hand(self.address, self._folder, self._seconds)
        self._in_flight, self._is_busy = step, True
        self._hand.start(
            {
                "upload": None if step is None else f"checkpoint-{step}",
                "replace": step in self._damaged,
                "forget": [f"checkpoint-{old}" for old in forget],
            }
        )

    def _note(self, answer: Answer) -> None:
        """Record the outcome of the upload in flight."""
        step, self._in_flight, self._is_busy = self._in_flight, None, False
        if "error" in answer:
            self._failed[-1 if step is None else step] = answer["error"]
            logger.warning("%s; training continues, the upload is retried later", answer["error"])
            return
        for name in answer["forgotten"]:
            self._there.discard(_step(name))
            self._let_go.discard(_step(name))
        if answer["problem"]:
            logger.warning("%s", answer["problem"])
            self._let_go.clear()  # not again and again; the next save asks anew
        if step is not None:
            self._there.add(step)
            self._damaged.discard(step)
            logger.info(
                "uploaded checkpoint-%d to %s (%s in %.1f s)",
                step,
                self.address,
                readable(answer["num_bytes"]),
                answer["seconds"],
            )


def _step(name: str) -> int:
    return step_of(Path(name))
