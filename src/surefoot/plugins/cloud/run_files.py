"""The small files of a run beside its checkpoints: recipe, metrics, plots, results."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ...checkpoint.disk.manifest import is_plain_name
from ...errors import CheckpointError, RunError
from ...storage import files
from ...storage.parallel_work import in_parallel
from .store import Contents, Store

MAX_BYTES = 1 << 30  # of one such file
_WORKERS = 4
Stamp = tuple[int, int]  # nanoseconds of the last change, length


def push(store: Store, folder: Path, sent: dict[str, Stamp]) -> None:
    """Upload the files that changed since ``sent``, which is updated."""
    changed = {name: stamp for name, stamp in _stamps(folder).items() if sent.get(name) != stamp}

    def send(name: str) -> None:
        with files.raising(CheckpointError), files.open_inside(folder, name) as file:
            data = files.read_all(file, MAX_BYTES)
        store.write(name, data)
        sent[name] = changed[name]

    in_parallel(send, sorted(changed), _WORKERS)


def pull(store: Store, folder: Path, there: Contents, *, keep: Callable[[str], bool]) -> None:
    """Download the run's files, except those in ``folder`` that it may ``keep``."""
    for name in there.of_the_run:
        path = folder / name
        if not is_plain_name(name) or there.files[name] > MAX_BYTES:
            continue
        if files.exists(path) and keep(name):
            continue
        data = store.read(name)
        with files.raising(RunError, f"cannot copy {store.address}/{name}"):
            files.make_folder(path.parent)
            files.write_aside(path, data)


def _stamps(folder: Path) -> dict[str, Stamp]:
    """The run's files below ``folder``, without checkpoints and hidden files."""
    found = {}
    for where, folders, names in os.walk(folder):
        here = Path(where)
        top = here == folder
        folders[:] = [
            n
            for n in folders
            if not n.startswith(".") and not (top and n.startswith("checkpoint-"))
        ]
        for name in names:
            path = here / name
            relative = path.relative_to(folder).as_posix()
            if is_plain_name(relative) and path.is_file() and not path.is_symlink():
                stat = path.stat()
                found[relative] = (stat.st_mtime_ns, stat.st_size)
    return found
