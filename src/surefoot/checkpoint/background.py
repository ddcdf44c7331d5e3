"""Save while training goes on: a snapshot into shared memory, and a process that writes it.

One save is in flight at a time. What goes wrong in it is told at the next call. The process has the
whole snapshot, so it finishes and commits even if the one that trains dies; it then ends.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import surefoot

from ..errors import CheckpointError
from . import snapshot
from .arena import Arena, Images, places
from .job import Job, Saved
from .save import Live


class Background:
    """Writes checkpoints in a process of its own, one after the other."""

    def __init__(self) -> None:
        self._arena: Arena | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._target: Path | None = None  # of the save in flight

    @property
    def is_busy(self) -> bool:
        """Whether a save is in flight, or one has ended that nobody has asked about."""
        return self._target is not None

    def start(self, job: Job, live: Live) -> None:
        """Take a snapshot and start to write it; the live tensors may change from then on.

        Raises:
            MemoryError: there is no room for the snapshot.
            CheckpointError: the process that writes cannot be started.
        """
        assert self._target is None, "one save at a time"
        sizes = [shard.plan.header.file_size for shard in job.shards]
        blobs = [len(data) for data in job.small.values()]
        starts, size = places([*sizes, *blobs])
        arena = self._room(size, live)
        images = Images(arena, starts[: len(sizes)], job.shards)
        snapshot.take(images, live.groups)
        small = dict(zip(job.small, zip(starts[len(sizes) :], blobs, strict=True), strict=True))
        for name, (start, length) in small.items():
            arena.view[start : start + length] = job.small[name]
        self._send(_describe(job, images, small), arena)
        self._target = job.target

    def poll(self) -> Saved | None:
        """The save that has ended since, if one has. Raises ``CheckpointError`` if it failed."""
        if self._target is None or not self._has_answer(0):
            return None
        return self.wait()

    def wait(self) -> Saved | None:
        """Wait for the save in flight, if there is one. Raises ``CheckpointError`` if it failed."""
        if self._target is None or self._process is None or self._process.stdout is None:
            return None
        target, self._target = self._target, None
        answer = self._process.stdout.readline()
        if not answer.endswith(b"\n"):
            raise CheckpointError(f"cannot save {target}: {self._death()}")
        told = json.loads(answer)
        if "error" in told:
            raise CheckpointError(told["error"])
        return Saved(
            target, told["num_bytes"], told["num_shared"], told["seconds"], told["problem"]
        )

    def close(self) -> None:
        """End the process, once it has written what it has, and give the memory back."""
        if self._process is not None and self._process.stdin and self._process.stdout:
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()
        if self._arena is not None:
            self._arena.close()
        self._process = self._arena = self._target = None

    def _room(self, size: int, live: Live) -> Arena:
        """The arena, made anew (and with it the process that maps it) if it is too small."""
        if self._arena is None or self._arena.size < size:
            self.close()
            self._arena = Arena.create(size)
            if any(t.is_cuda for tensors in live.groups.values() for t in tensors.values()):
                snapshot.pin(self._arena)
        return self._arena

    def _send(self, message: Mapping[str, object], arena: Arena) -> None:
        if self._process is None or self._process.poll() is not None:
            self._process = _start(arena)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise CheckpointError(f"cannot save {message['step']}: {self._death()}") from error

    def _has_answer(self, seconds: float) -> bool:
        assert self._process is not None
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def _death(self) -> str:
        """How the process ended, for people."""
        assert self._process is not None
        code = self._process.wait()
        how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        hint = "; is memory short?" if code == -signal.SIGKILL else ""
        return f"the process that writes checkpoints was ended {how}{hint}"


def _start(arena: Arena) -> subprocess.Popen[bytes]:
    """The process; `-P` and the path, so that it imports this very package and nothing beside."""
    home = str(Path(surefoot.__file__).parent.parent)
    known = os.environ.get("PYTHONPATH")
    command = [sys.executable, "-P", "-m", "surefoot.checkpoint.writer"]
    try:
        return subprocess.Popen(
            [*command, str(arena.descriptor), str(arena.size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[arena.descriptor],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([home, known] if known else [home])},
        )
    except OSError as error:
        raise CheckpointError(
            f"cannot start the process that writes checkpoints: {error}"
        ) from error


def _describe(job: Job, images: Images, small: Mapping[str, tuple[int, int]]) -> dict[str, object]:
    """A job as JSON; what is large lies in the arena."""
    starts = zip(job.shards, images.starts, strict=True)
    return {
        "root": str(job.root.absolute()),
        "step": job.step,
        "kind": job.kind,
        "created": job.created,
        "versions": job.versions,
        "parent": job.parent,
        "forget": list(job.forget),
        "share": job.share,
        "shards": [(s.role, s.plan.name, start, s.plan.header.file_size) for s, start in starts],
        "small": small,
    }
