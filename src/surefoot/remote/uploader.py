"""The uploader process: ``python -m surefoot.remote.uploader URL FOLDER SECONDS``.

It reads one task per line from its standard input and answers with a line, at low priority. The end
of its input also means that the training process is dead. It then ends, once it has done its tasks.
If there are several such processes of one run, the first works and the others wait.
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

from ..errors import STOP_SIGNALS, CheckpointError, SurefootError
from ..storage import files
from ..storage.address import Address
from .run_files import Stamp, push
from .store import Store
from .uploading import remove, upload

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
