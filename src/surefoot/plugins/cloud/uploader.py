"""Upload a committed checkpoint to a store: its files, then its manifest, which commits it there.

Only files in its manifest are uploaded, not a user's notes. All lengths are compared with a listing
of the store before the manifest is uploaded. The manifest is created, never replaced: an existing
checkpoint is not overwritten by another of its name.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...checkpoint.disk import strict_json
from ...checkpoint.disk.folder import open_checkpoint
from ...checkpoint.disk.manifest import MANIFEST
from ...checkpoint.reading.verification import verify_checkpoint
from ...errors import STOP_SIGNALS, CheckpointError, SurefootError
from ...storage import files
from ...storage.address import Address
from ...storage.parallel_work import in_parallel
from .run_files import Stamp, push
from .store import Contents, Store, StoreError

DAMAGED = "manifest.damaged.json"  # what the manifest of a damaged checkpoint is renamed to
_WORKERS = 4  # files on their way at a time


def upload(store: Store, folder: Path, *, replace: bool = False) -> int:
    """Upload the checkpoint ``folder``; when this returns, it exists in the store.

    An existing one of its name is an error, unless it is the same, or damaged and to ``replace``.
    """
    name = folder.name
    report = verify_checkpoint(folder, full=True)
    if not report.ok:
        raise CheckpointError(f"{report.problems[0]}; it is not uploaded")
    with files.raising(CheckpointError), files.open_inside(folder, MANIFEST) as file:
        manifest = files.read_all(file, strict_json.MAX_BYTES)
    if f"{name}/{MANIFEST}" in store.list(name):
        there = store.read(f"{name}/{MANIFEST}")
        if there == manifest:
            return 0  # the very same checkpoint, from an earlier try
        if not replace:
            raise _taken(store, name)
        store.write(f"{name}/{DAMAGED}", there)
        store.delete(f"{name}/{MANIFEST}")
    wanted = open_checkpoint(folder).manifest.files
    _put(store, folder, wanted)
    if not store.create(f"{name}/{MANIFEST}", manifest):
        raise _taken(store, name)
    return sum(wanted.values()) + len(manifest)


def _taken(store: Store, name: str) -> CheckpointError:
    return CheckpointError(
        f"{store.address.inside(name)}: another checkpoint of this name exists there, and a "
        "checkpoint is never overwritten; does another process train with the same output_dir?"
    )


def _put(store: Store, folder: Path, wanted: Mapping[str, int]) -> None:
    """Upload all files, and check that they exist at full length."""
    largest_first = sorted(wanted, key=lambda name: (-wanted[name], name))
    with files.raising(CheckpointError):
        in_parallel(
            lambda name: store.put(f"{folder.name}/{name}", folder / name), largest_first, _WORKERS
        )
    found = Contents(store.list(folder.name)).inside(folder.name)
    for name, size in wanted.items():
        if found.get(name) != size:
            has = "is missing" if name not in found else f"has {found[name]} bytes"
            raise StoreError(
                f"{store.address.inside(folder.name)}/{name}: {has} after the upload, "
                f"expected {size} bytes"
            )


def remove(store: Store, name: str) -> None:
    """Delete a checkpoint in the store: its manifest first, then its files."""
    store.delete(f"{name}/{MANIFEST}")
    in_parallel(store.delete, sorted(store.list(name)), _WORKERS)
    store.delete_folder(name)


LOCK = ".upload.lock"
_PAUSE = 0.2  # seconds between two looks at a lock


class Uploader:
    """Does the tasks of one run, one after another."""

    def __init__(self, store: Store, folder: Path) -> None:
        self._store = store
        self._folder = folder
        self._sent: dict[str, Stamp] = {}  # files of the run that are in the store as they are here

    def serve(self, task: Mapping[str, Any]) -> dict[str, object]:
        """Do one task: upload a checkpoint, or none, then delete those to ``forget``."""
        began = time.monotonic()
        try:
            done = self._do(task)
        except SurefootError as error:
            return {"error": str(error)}
        except Exception as error:
            traceback.print_exc()
            return {"error": f"cannot upload: {type(error).__name__}: {error}"}
        return {**done, "seconds": time.monotonic() - began}

    def _do(self, task: Mapping[str, Any]) -> dict[str, object]:
        push(self._store, self._folder, self._sent)  # first: metrics must not lag behind a step
        num_bytes, name = 0, task["upload"]
        if name is not None:
            num_bytes = upload(self._store, self._folder / name, replace=task["replace"])
        forgotten: list[str] = []
        problem = None
        try:
            for old in task["forget"]:
                remove(self._store, old)
                forgotten.append(old)
        except CheckpointError as error:
            problem = f"cannot delete an old checkpoint: {error}"
        return {"num_bytes": num_bytes, "forgotten": forgotten, "problem": problem}


def main(url: str, folder: Path, seconds: float) -> None:
    """Serve until the end of the input."""
    for number in STOP_SIGNALS:  # for the process that trains
        signal.signal(number, signal.SIG_IGN)
    os.nice(19)  # not idle, as the writer: a run may end while other jobs take all cores
    uploader = Uploader(Store(Address(url), seconds=seconds), folder)
    with contextlib.suppress(BrokenPipeError):
        for line in sys.stdin.buffer:
            with _alone(folder):
                answer = uploader.serve(json.loads(line))
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process uploads from ``folder``, such as that of a run that died."""
    path = folder / LOCK
    with contextlib.suppress(FileExistsError):
        files.create(path).close()
    with files.open_file(path, write=True) as lock:
        while True:
            try:
                lock.lock()
                break
            except BlockingIOError:
                time.sleep(_PAUSE)
        yield


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
