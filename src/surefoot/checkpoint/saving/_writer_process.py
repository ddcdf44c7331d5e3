"""Asynchronous save: a snapshot into shared memory, and a writer process.

At most one save is in flight, and its errors are raised by the next call. The writer process has
the complete snapshot, so it finishes and commits even if the training process dies; it then ends.
The copy of live tensors into the snapshot buffer is all that a save costs the training thread.
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
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import surefoot

from ...errors import STOP_SIGNALS, CheckpointError
from ...log import fell_back
from ...parallel.progress import wait_for_ranks
from ...storage.folder_lock import StallWatch, state_of
from ..disk.commit import clean, parts_of
from ._snapshot_buffer import FileImages, JobSnapshot, SnapshotBuffer, image_of, places
from ._writing import MOST_ATTEMPTS, Job, Saved
from .apart import ALIVE, save
from .preparation import LiveTensors

logger = logging.getLogger(__name__)
_PAUSE = 1.0  # seconds between two looks at a writer process that has not answered
_WARNING = 60.0  # seconds in which it writes nothing, until a warning
_PATIENCE = 900.0  # the same, until it is killed
_LAST_WAIT = 10.0  # seconds for the end of a killed process
_SLACK = 1 << 20  # bytes; the log in the state grows from save to save


# A process, because a thread shares the interpreter's lock, and after a fork every page that
# training touches is copied: steps were 26 to 63 % and 60 to 80 % slower meanwhile; with a process
# and shared memory they were 3 to 8 % slower (docs/decisions/0014).
class Background:
    """Writes checkpoints in a process of its own, one after another; where that is off, at once."""

    def __init__(self, *, is_off: bool = False) -> None:
        self.is_off = is_off  # also after a save that could not be asynchronous
        self._arena: SnapshotBuffer | None = None
        self._is_pinned = False  # whether GPUs copy straight into it
        self._writer: _Writer | None = None
        self._snapshot: JobSnapshot | None = None  # of the save in flight

    @property
    def target(self) -> Path | None:
        """The checkpoint that is being written."""
        return None if self._snapshot is None else self._snapshot.job.target

    @property
    def pid(self) -> int | None:
        """Process id of the writer process; None if there is none."""
        return None if self._writer is None else self._writer.process.pid

    def save(self, job: Job, live: LiveTensors) -> Saved | None:
        """Start to write ``job``; or write it now, and return what was saved. Raises
        ``CheckpointError`` if it could not be written now."""
        if not self.is_off:
            try:
                self.start(job, live)
            except MemoryError as error:
                why = f"no room for a snapshot of the state ({error})"
            except CheckpointError as error:
                why = str(error)
            else:
                return None
            fell_back("asynchronous saves are off", why, "makes training wait for every save")
            self.is_off = True
        while True:  # all ranks of a joint save write again if one has failed
            is_last = not job.is_repeated_by_all or job.attempt + 1 >= MOST_ATTEMPTS
            try:
                saved = save(job, live)
            except CheckpointError:
                if is_last:
                    raise
            else:
                if is_last or saved.is_committed:
                    return saved
            job = replace(job, attempt=job.attempt + 1)

    def start(self, job: Job, live: LiveTensors) -> None:
        """Take a snapshot and start to write it. ``MemoryError`` if there is no room for it,
        ``CheckpointError`` if there is no process to write it."""
        assert self._snapshot is None, "a save is already in flight"
        sizes = [image_of(shard).size for shard in job.shards]
        blobs = [len(data) for data in job.small.values()]
        starts, size = places([*sizes, *blobs])
        arena = self._room(size, size + sum(blobs) + _SLACK, live)
        images = FileImages(arena, starts[: len(sizes)], job.shards)
        take(images, live.groups)
        small = dict(zip(job.small, zip(starts[len(sizes) :], blobs, strict=True), strict=True))
        for name, (start, length) in small.items():
            arena.view[start : start + length] = job.small[name]
        self._send(JobSnapshot(job, images, small))

    def poll(self) -> Saved | None:
        """The save that has ended since the last call; raises if it failed."""
        if self._snapshot is None or self._writer is None or not self._writer.has_answer():
            return None
        return self._end(self._snapshot)

    def wait(self) -> Saved | None:
        """Wait for the save in flight, if there is one. Raises ``CheckpointError`` if it failed."""
        saved = None
        while saved is None and self._snapshot is not None:
            saved = self._end(self._snapshot)
        return saved

    def close(self) -> None:
        """Wait for the save in flight, end the process and free the memory."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()
            if self._arena is not None:
                if self._is_pinned:
                    unpin(self._arena)
                self._arena.close()
            self._writer, self._arena, self._is_pinned = None, None, False

    def _end(self, snapshot: JobSnapshot) -> Saved | None:
        """Wait for the end of an attempt: what was saved, or None if another attempt was started.

        A killed writer process is replaced, and all ranks of a joint save retry when one of them
        has failed: the snapshot still exists. Does not wait for the new attempt, because the other
        ranks may have to learn of it in the training loop.
        """
        assert self._writer is not None
        job = snapshot.job
        target = job.target
        if line := self._writer.answer(target):
            answer = json.loads(line)
            # In a joint save all write again, whatever failed in whichever rank: nobody has to know
            # why, and nothing half written is built upon (docs/decisions/0021).
            problem, can_retry = answer.get("error", ""), job.is_repeated_by_all
            is_done = not problem and answer["is_committed"]
        else:
            answer, is_done, can_retry = {}, False, True
            problem = f"cannot save {target}: {self._writer.death()}"
            clean(target.parent)
        self._snapshot, again = None, replace(job, attempt=job.attempt + 1)
        if not is_done and can_retry and again.attempt < MOST_ATTEMPTS:
            logger.warning("%s; retrying once", problem or f"{target.name} is not committed")
            self._send(replace(snapshot, job=again))
            return None
        if problem:
            raise CheckpointError(problem)
        return Saved(**{**answer, "path": target})

    def _room(self, size: int, ample: int, live: LiveTensors) -> SnapshotBuffer:
        """The snapshot buffer; a too small one is replaced, with the process that maps it."""
        if self._arena is None or self._arena.size < size:
            self.close()
            self._arena = SnapshotBuffer.create(ample)
            if any(t.is_cuda for tensors in live.groups.values() for t in tensors.values()):
                self._is_pinned = pin(self._arena)
        return self._arena

    def _send(self, snapshot: JobSnapshot) -> None:
        """Let the writer process write a snapshot; a process that has died is replaced."""
        if self._writer is not None and not self._writer.is_alive:
            self._writer.close()
            self._writer = None
        if self._writer is None:
            self._writer = _Writer(snapshot.images.arena)
        self._writer.send(json.dumps(snapshot.dump()).encode() + b"\n")
        self._snapshot = snapshot


class _Writer:
    def __init__(self, arena: SnapshotBuffer) -> None:
        package_root = str(Path(surefoot.__file__).parent.parent)
        python_path = os.environ.get("PYTHONPATH")
        # -P and the path: it imports this very package, and nothing that lies about.
        command = [sys.executable, "-P", "-m", "surefoot.checkpoint.saving._writer"]
        # Ctrl-C in a terminal, or a job manager that signals the whole group, must not end a save.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # the child inherits it
        try:
            self.process = subprocess.Popen(
                [*command, str(arena.descriptor), str(arena.size)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[arena.descriptor],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, (package_root, python_path))),
                },
            )
        except OSError as error:
            raise CheckpointError(
                f"cannot start the writer process for checkpoints: {error}"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._jobs, self._answers = self.process.stdin, self.process.stdout
        self.stalled: str | None = None  # why it was killed
        # A hook cannot be removed again: with a strong reference every writer would stay for ever.
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _let_go(this()))

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def send(self, message: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it died; whoever waits for an answer sees it
            self._jobs.write(message)
            self._jobs.flush()

    def has_answer(self) -> bool:
        return bool(select.select([self._answers], [], [], 0)[0])

    def answer(self, target: Path) -> bytes:
        """Wait for a line about ``target``; empty if the process died instead. One that writes
        nothing for minutes is killed."""
        watch, warned = StallWatch(lambda: [*parts_of(target), target.parent / ALIVE]), 0.0
        while not select.select([self._answers], [], [], _PAUSE)[0]:
            stalled = watch.seconds()
            if stalled > _PATIENCE:
                self.stalled = f"it wrote nothing for {stalled:,.0f} s"
                self.process.kill()
                break
            if stalled > warned + _WARNING:
                warned = stalled
                self._warn(target, stalled)
        else:
            line = self._answers.readline()
            return line if line.endswith(b"\n") else b""
        return b""

    def _warn(self, target: Path, stalled: float) -> None:
        pid = self.process.pid
        state = state_of(pid)
        logger.warning(
            "%s: the writer process (pid %d%s) has written nothing for %.0f s; training waits for "
            "it. After %.0f s it is killed and replaced; `kill -KILL %d` does that now",
            target,
            pid,
            f", {state}" if state else "",
            stalled,
            _PATIENCE,
            pid,
        )

    def death(self) -> str:
        """How the process ended, for people."""
        try:
            code = self.process.wait(None if self.stalled is None else _LAST_WAIT)
        except subprocess.TimeoutExpired:  # it hangs in the system, where no signal reaches it
            pid = self.process.pid
            return f"the writer process for checkpoints (pid {pid}) hangs: {self.stalled}"
        if self.stalled is not None:
            return f"the writer process for checkpoints was killed: {self.stalled}"
        how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        hint = "; is memory short?" if code == -signal.SIGKILL else ""
        return f"the writer process for checkpoints ended {how}{hint}"

    def close(self) -> None:
        self.let_go()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(None if self.stalled is None else _LAST_WAIT)

    def let_go(self) -> None:
        """Close the pipes."""
        with contextlib.suppress(BrokenPipeError):
            self._jobs.close()
        self._answers.close()


def _let_go(writer: _Writer | None) -> None:
    """In a forked process, such as a data loader's worker: if it kept the pipes open, the writer
    would not see the end of the training process, nor that this one has closed them.
    """
    if writer is not None:
        writer.let_go()


Groups = Mapping[str, Mapping[str, torch.Tensor]]  # role -> name -> tensor


@torch.no_grad()
def take(images: FileImages, groups: Groups) -> None:
    """Fill the image of every file: its header, and the current values of the tensors."""
    with _overlapping(groups):
        for shard in images.shards:
            image = images.of(shard)
            image[: len(shard.plan.head)] = shard.plan.head
            for name in images.names(shard):
                tensor, into = groups[shard.role][name].detach(), images.tensor(shard, name)
                if tensor.numel():
                    place = torch.frombuffer(into, dtype=torch.uint8).view(tensor.dtype)
                    place.view(tensor.shape).copy_(tensor, non_blocking=True)


@contextlib.contextmanager
def _overlapping(groups: Groups) -> Iterator[None]:
    """Copies from a GPU overlap with its other work, and are complete at the end of the block."""
    devices = {t.device for tensors in groups.values() for t in tensors.values() if t.is_cuda}
    with contextlib.ExitStack() as stack:
        for device in devices:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # The update of this step may still be queued; the copy must see its result.
            stream.wait_stream(torch.cuda.current_stream(device))
            stack.callback(wait_for_ranks, stream.synchronize)
            stack.enter_context(torch.cuda.stream(stream))
        yield


def pin(arena: SnapshotBuffer) -> bool:
    """Pin the buffer's pages for direct copies from GPUs; if that fails, copies are slower."""
    # In place: pin_memory() would copy into memory of its own, which
    # the writer process does not map.
    if (code := int(_runtime().cudaHostRegister(_address(arena), arena.size, 0))) == 0:
        return True
    what, why = "the snapshot of a save is not in pinned memory", f"cudaHostRegister gave {code}"
    fell_back(what, why, "makes its copy from the GPU slower, for which training waits")
    # CUDA keeps the error, and torch would raise it at the next kernel, in the middle of training.
    with contextlib.suppress(RuntimeError):
        torch.zeros((), device="cuda")
    return False


def unpin(arena: SnapshotBuffer) -> None:
    """Unpin the pages, before the buffer is freed."""
    _runtime().cudaHostUnregister(_address(arena))


def _address(arena: SnapshotBuffer) -> int:
    return torch.frombuffer(arena.view, dtype=torch.uint8).data_ptr()


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
