"""Keeps the store's copy of a run up to date while it trains.

At most one upload is in flight. The latest checkpoint is always uploaded next. An older one that
had to wait is uploaded when there is no later one, if the retention policy has kept it. Errors
never stop training: they are logged, and the upload is retried with the next save. Only the end of
the run waits for all uploads.

``python -m surefoot.plugins.cloud.mirror URL FOLDER SECONDS LAUNCH`` is the process that uploads: a
task a line, as JSON, and its outcome as the answer. It ends with its input, not with the run: the
upload that a killed run has begun is finished.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from ...checkpoint.disk.commit import committed, step_of
from ...checkpoint.disk.manifest import is_plain_name
from ...errors import STOP_SIGNALS, CheckpointError, LostPeerError, SurefootError
from ...storage import files
from ...storage.child import Child
from ...storage.parallel_work import in_parallel
from ...storage.remote import Address
from ...terminal_text import in_bytes
from ...training.callbacks.launches import NAME as RECORD
from .checkpoints import (
    MAX_RUN_FILE,
    WORKERS,
    AnotherRunError,
    claim,
    refuse_late,
    remove,
    upload,
)
from .lineage import FIRST, OTHERS, Stored, StoredLaunch, name_of, stored_of
from .stopping import keep_looking
from .store import Store

logger = logging.getLogger(__name__)
LOCK = ".upload.lock"
_FIRST_LAUNCH = StoredLaunch(FIRST)
_PAUSE = 0.2  # seconds between two looks at a lock
_LONG = 3600.0  # seconds; an answer that is waited for is waited for again
Task = Mapping[str, Any]  # upload: a step or None; replace: what is damaged there; forget: names
Answer = dict[str, Any]
Stamp = tuple[int, int]  # nanoseconds of the last change of a file, its length


@dataclass
class _Checkpoint:
    """What the mirror knows of one step."""

    in_store: Literal["missing", "damaged", "whole"] = "missing"
    is_dropped: bool = False  # the run has deleted it, and so it is deleted there, too
    has_failed: bool = False  # it could not be uploaded or deleted, since the last save


class Mirror:
    """Uploads the checkpoints of ``folder`` to ``store``, and deletes there what the run deletes.

    A listener of the saver (``SaveListener``), and a context manager: at its end, unless the run
    failed, it waits until everything is uploaded.
    """

    _brings_run_files = True  # with each task

    def __init__(
        self,
        store: Store,
        folder: Path,
        *,
        there: Collection[Stored] = (),
        damaged: Collection[Stored] = (),
        void: Collection[Stored] = (),
        launch: StoredLaunch = _FIRST_LAUNCH,
        seconds: float = 600,
    ) -> None:
        """``there`` and ``damaged`` are of this run; ``void`` are deleted once this ``launch`` has
        stored a checkpoint."""
        self.address = store.address
        self._folder = folder
        self._launch = launch
        self._seconds = seconds
        self._launches = dict((*there, *damaged))
        self._void = [name_of(stored) for stored in void]
        self._checkpoints = defaultdict[int, _Checkpoint](_Checkpoint)
        for step, _ in damaged:
            self._checkpoints[step].in_store = "damaged"
        for step, _ in there:
            self._checkpoints[step].in_store = "whole"
        self._leaving: set[int] = set()  # steps that the save in progress deletes here
        self._task: Task | None = None  # in flight
        self._failure: str | None = None  # of an upload, since the last save
        self._meets_another = False  # another run, or a later launch, stores its checkpoints there
        self._has_committed = False  # this launch
        self._worker: Child | _Inline | None = None

    @property
    def steps(self) -> frozenset[int]:
        """The steps that exist in the store, as far as is known."""
        checkpoints = self._checkpoints.items()
        return frozenset(step for step, checkpoint in checkpoints if checkpoint.in_store == "whole")

    @property
    def protected(self) -> set[int]:
        """Steps whose local copies are needed: in flight, or next and later than all uploaded."""
        waiting = self._next()
        is_ahead = waiting is not None and waiting > max(self.steps, default=-1)
        steps = {self._uploading, waiting if is_ahead else None}
        return {step for step in steps if step is not None}

    def __enter__(self) -> Mirror:
        self._working()  # it also looks for requests to stop
        self._start()  # what an earlier start of the run could not upload
        return self

    def on_save(self, replaces: Iterable[str]) -> None:
        """Do not start to upload checkpoints that are about to be deleted in ``folder``."""
        self._leaving = {step_of(Path(name)) for name in replaces}

    def on_committed(self, path: Path, replaces: Iterable[str]) -> None:
        """Upload ``path``, and delete in the store the checkpoints that it ``replaces``."""
        self._try_again()
        step, uploading = step_of(path), self._uploading
        for old in sorted({step_of(Path(name)) for name in replaces} - self.steps - {uploading}):
            if self._checkpoints[old].is_dropped:
                continue  # with the save before, and by now in the store, too
            logger.info(
                "checkpoint-%d was not uploaded: a newer checkpoint was uploaded first, and "
                "the retention policy has deleted this one",
                old,
            )
        self.on_deleted(replaces)
        self._checkpoints[step].is_dropped = False
        self.on_poll()
        if self._task is None:
            self._start()
        elif uploading is not None and uploading < step:
            message = "upload of %s queued: checkpoint-%d is still being uploaded to %s"
            logger.info(message, path.name, uploading, self.address)

    def on_deleted(self, names: Iterable[str]) -> None:
        """Delete these in the store too, as soon as a later one is there."""
        self._leaving = set()
        for name in names:
            self._checkpoints[step_of(Path(name))].is_dropped = True

    def on_poll(self) -> None:
        """If the upload in flight has ended, store its outcome and start the next."""
        if self._task is not None and (answer := self._answer(0.0)) is not None:
            self._end_task(self._task, answer)
            self._start()

    def finish(self) -> None:
        """Wait until everything is uploaded; a ``CheckpointError`` if it could not be."""
        self._try_again()
        self._leaving = set()  # no save is on its way any more that would drop them
        self._start_and_wait()
        if self._failure is None:
            # Metrics and results of the end are newer than the last checkpoint.
            self._start_and_wait(run_files=True)
        if self._failure is not None:
            raise CheckpointError(
                f"not everything could be uploaded to {self.address}: {self._failure}. The local "
                f"copy is in {self._folder}; start the same command again to upload what is missing"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            is_lost = isinstance(error, LostPeerError)  # a run that starts again must not wait
            # KeyboardInterrupt is no Exception: nobody waits for an upload then.
            is_over = is_lost or self._meets_another
            if error is None or (isinstance(error, Exception) and not is_over):
                self.finish()
        except CheckpointError as failure:
            if error is None:
                raise
            logger.error("%s", failure)
        finally:
            if self._worker is not None:
                # One that still uploads finishes by itself, and is not waited for.
                self._worker.release(wait=self._task is None)

    @property
    def _uploading(self) -> int | None:
        return None if self._task is None else self._task["upload"]

    def _next(self) -> int | None:
        """The latest checkpoint that is local, not in the store, and may be uploaded: of this
        launch, as those up to the one that it continues are of launches before."""
        base = self._launch.base
        for step in sorted(map(step_of, committed(self._folder)), reverse=True):
            if base is not None and step <= base[0]:
                break
            checkpoint = self._checkpoints[step]
            is_done = checkpoint.in_store == "whole" or step == self._uploading
            is_leaving = checkpoint.is_dropped or step in self._leaving
            if not (is_done or is_leaving or checkpoint.has_failed):
                return step
        return None

    def _start(self, *, run_files: bool = False) -> None:
        """Give the worker its next task, if there is one: a checkpoint to upload, those to delete,
        or at least the ``run_files``, which each task brings up to date."""
        step = self._next()
        # One is deleted there once a newer one exists, so that there is always one.
        newest = max(self.steps | ({step} if step is not None else set()), default=-1)
        dropped = [old for old in self.steps if old < newest and self._checkpoints[old].is_dropped]
        steps = sorted(old for old in dropped if not self._checkpoints[old].has_failed)
        forget = [name_of((old, self._launches.get(old, self._launch.number))) for old in steps]
        if self._has_committed:
            forget += self._void
        if step is None and not forget and not run_files:
            return
        replace = step is not None and self._checkpoints[step].in_store == "damaged"
        self._send(step, forget, replace=replace, run_files=run_files or self._brings_run_files)

    def _send(
        self, upload: int | None, forget: Collection[str], *, replace: bool, run_files: bool
    ) -> None:
        """Give the worker a task. Whatever it is, the worker looks first whether a later launch has
        begun."""
        names = ("upload", "forget", "replace", "run_files")
        self._task = dict(zip(names, (upload, forget, replace, run_files), strict=True))
        self._working().send(self._task)

    def _working(self) -> Child | _Inline:
        """What does the tasks; started if it does not run."""
        if isinstance(self._worker, Child) and self._worker.code is not None:  # it was killed
            self._worker = None
        if self._worker is None:
            self._worker = _start_worker(
                self.address, self._folder, self._seconds, self._launch.number
            )
        return self._worker

    def _start_and_wait(self, *, run_files: bool = False) -> None:
        """Wait until there is nothing left to do, or something failed."""
        if self._task is None:
            self._start(run_files=run_files)
        while self._task is not None:
            if (step := self._uploading) is not None:
                logger.info("waiting for the upload of checkpoint-%d to %s", step, self.address)
            while (answer := self._answer(_LONG)) is None:
                pass
            self._end_task(self._task, answer)
            if self._failure is None:
                self._start()

    def _answer(self, seconds: float) -> Answer | None:
        """The outcome of the task in flight; an error if its process was killed. None if it is not
        done in ``seconds``."""
        assert self._worker is not None
        try:
            return self._worker.answer(seconds)
        except EOFError:
            return {"error": f"the process that uploads was ended {self._worker.ending}"}

    def _end_task(self, task: Task, answer: Answer) -> None:
        """Record the outcome of the task that was in flight."""
        self._task, step = None, task["upload"]
        if answer.get("is_another"):
            self._meets_another = True
            raise CheckpointError(answer["error"])
        if "error" in answer:
            self._failure = answer["error"]
            for failed in {step, *self._steps(task["forget"])} - {None}:
                self._checkpoints[failed].has_failed = True
            logger.warning("%s; training continues, the upload is retried later", answer["error"])
            return
        for old in self._steps(answer["forgotten"]):
            self._checkpoints[old].in_store = "missing"
        if answer["problem"]:
            logger.warning("%s", answer["problem"])
            for old in self._steps(task["forget"]):
                self._checkpoints[old].has_failed = True  # not again and again
        self._void = [name for name in self._void if name not in task["forget"]]  # tried once
        if step is not None:
            self._is_stored(step)
            size = in_bytes(answer["num_bytes"])
            message = "uploaded checkpoint-%d to %s (%s in %.1f s)"
            logger.info(message, step, self.address, size, answer["seconds"])

    def _is_stored(self, step: int) -> None:
        self._checkpoints[step].in_store = "whole"
        self._launches[step], self._has_committed = self._launch.number, True

    def _steps(self, names: Iterable[str]) -> list[int]:
        """The steps of checkpoints of this run among ``names``."""
        found = [stored_of(name) for name in names if name not in self._void]
        return [stored[0] for stored in found if stored is not None]

    def _try_again(self) -> None:
        """Forget what has failed, and so do it with the next task."""
        self._failure = None
        for checkpoint in self._checkpoints.values():
            checkpoint.has_failed = False


class MirrorOfRanks(Mirror):
    """The same where ranks upload their parts by themselves, with the files of the run before each
    commit (``apart``): what is deleted, and the files of the run at its end, are left."""

    _brings_run_files = False

    def on_save(self, replaces: Iterable[str]) -> None:
        """Look whether a later launch has begun: the save that finds it may only be logged
        (``checkpoint.on_save_error: continue``)."""
        super().on_save(replaces)
        if self._task is None:
            self._send(None, (), replace=False, run_files=False)

    def on_committed(self, path: Path, replaces: Iterable[str]) -> None:
        """It is in the store."""
        self._is_stored(step_of(path))
        super().on_committed(path, replaces)

    def _next(self) -> None:
        return None


def _start_worker(address: Address, folder: Path, seconds: float, launch: int) -> Child | _Inline:
    """What does tasks in the background, one after another."""
    if address.scheme == "memory":
        return _Inline(Uploader(Store(address, seconds=seconds), folder, launch))
    command = ["-m", __name__, str(address), str(folder.absolute()), str(seconds), str(launch)]
    try:
        return Child(command, talks=True)
    except OSError as error:
        raise CheckpointError(f"cannot start the process that uploads: {error}") from error


class _Inline:
    """The worker of ``memory://``, which exists only inside this process."""

    ending = ""

    def __init__(self, uploader: Uploader) -> None:
        self._uploader = uploader
        self._answer: Answer = {}

    def send(self, task: Task) -> None:
        self._answer = self._uploader.serve(task)

    def answer(self, _seconds: float) -> Answer:
        return self._answer

    def release(self, *, wait: bool) -> None:
        pass


class Uploader:
    """Does the tasks of one launch, one after another."""

    def __init__(self, store: Store, folder: Path, launch: int = FIRST) -> None:
        self.store = store
        self._folder = folder
        self._launch = launch
        self._place = StoredLaunch(launch).place
        self._sent: dict[str, Stamp] = {}  # files of the run that are in the store as they are here

    def serve(self, task: Task) -> Answer:
        """Do one task: upload a checkpoint, or none, then delete those to ``forget``."""
        began = time.monotonic()
        try:
            return {**self._do(task), "seconds": time.monotonic() - began}
        except AnotherRunError as error:
            return {"error": str(error), "is_another": True}
        except SurefootError as error:
            return {"error": str(error)}
        except Exception as error:
            traceback.print_exc()
            return {"error": f"cannot upload: {type(error).__name__}: {error}"}

    def _do(self, task: Task) -> Answer:
        claim(self.store, self._folder)
        refuse_late(self.store, self._launch)
        if task["run_files"]:
            self.upload_run_files()  # first: metrics must not lag behind a step
        num_bytes, step = 0, task["upload"]
        if step is not None:
            path = self._folder / f"checkpoint-{step}"
            num_bytes = upload(self.store, path, launch=self._launch, replace=task["replace"])
        forgotten: list[str] = []
        problem = None
        try:
            for old in task["forget"]:
                refuse_late(self.store, self._launch)
                remove(self.store, old)
                forgotten.append(old)
        except AnotherRunError:
            raise
        except CheckpointError as error:
            problem = f"cannot delete an old checkpoint: {error}"
        return {"num_bytes": num_bytes, "forgotten": forgotten, "problem": problem}

    def upload_run_files(self) -> None:
        """Upload the run's files that have changed: recipe, metrics, plots, results; no checkpoints
        and no hidden files."""
        changed: dict[str, Stamp] = {}
        for parent, folders, names in os.walk(self._folder):
            below = Path(parent).relative_to(self._folder)
            folders[:] = [name for name in folders if not str(below / name).startswith(OTHERS)]
            for name in (str(below / name) for name in names):
                path = self._folder / name
                if is_plain_name(name) and path.is_file() and not path.is_symlink():
                    status = path.stat()
                    stamp = status.st_mtime_ns, status.st_size
                    if self._sent.get(name) != stamp:
                        changed[name] = stamp

        def send(name: str) -> None:
            with files.raising(CheckpointError):
                data = files.read_inside(self._folder, name, MAX_RUN_FILE)
            self.store.write(self._place + name, data)
            self._sent[name] = changed[name]

        in_parallel(send, sorted(changed.keys() - {RECORD}), WORKERS)
        if RECORD in changed:  # last: the others are there
            send(RECORD)


def main(url: str, folder: Path, seconds: float, launch: int) -> None:
    """Serve until the end of the input."""
    for number in STOP_SIGNALS:  # for the process that trains
        signal.signal(number, signal.SIG_IGN)
    os.nice(19)  # not idle, as the writer: a run may end while other jobs take all cores
    uploader = Uploader(Store(Address(url), seconds=seconds), folder, launch)
    asked = Store(Address(url), seconds=0), folder, launch
    looks = threading.Thread(target=keep_looking, args=asked, daemon=True)
    looks.start()  # beside an upload, which may take an hour
    with contextlib.suppress(BrokenPipeError):
        for line in sys.stdin.buffer:
            with _alone(folder):
                answer = uploader.serve(json.loads(line))
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process uploads from ``folder``, such as that of a run that died."""
    with files.open_or_create(folder / LOCK) as lock:
        while True:
            with contextlib.suppress(BlockingIOError):
                lock.lock()
                break
            time.sleep(_PAUSE)
        yield


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
