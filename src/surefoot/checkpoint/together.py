"""Several processes write one checkpoint: each its own files, and a report; the first commits.

A report, ``.rank_00003.json`` in the folder aside, is locked by its writer until it is whole. So
the first process tells one that still writes from one that died, whatever machine it ran on; the
others tell it of the first one by the lock of the manifest. If any of them fails or dies, the
attempt has failed for all, and each of them makes another one, in a folder of its own.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import files
from ..errors import CheckpointError
from .commit import part_of
from .index import MANIFEST, Piece, dump_piece, parse_piece
from .job import Job

_REPORT = ".rank_{:05d}.json"
_PAUSE = 0.02  # seconds between two looks
_PATIENCE = 120.0  # seconds for another process to begin; much less than collectives wait
_LAST_CHANCE = 5.0  # the same, when those that train are dead
_MAX_REPORT = 1 << 30


@dataclass
class Written:
    """What lies in the folder so far."""

    files: dict[str, int] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    num_shared: int = 0


def contribute(
    job: Job, write_files: Callable[[Path], Written], is_orphan: Callable[[], bool]
) -> tuple[int, bool]:
    """Write the files of a process that is not the first, report them, and wait for the commit.

    Returns their bytes, and whether they are committed. What goes wrong here is reported as well:
    the first process tells it.
    """
    folder = _folder(job, is_orphan)
    if folder is None:
        return 0, files.exists(job.target / MANIFEST)
    try:
        size = _write(job, folder, write_files)
    except FileNotFoundError:
        if files.exists(folder / MANIFEST):
            raise
        size = 0  # the attempt has failed meanwhile
    return size, _is_committed(job, folder)


def _write(job: Job, folder: Path, write_files: Callable[[Path], Written]) -> int:
    path = folder / _REPORT.format(job.rank)
    with files.create(path.with_suffix(".part")) as report:
        report.lock()
        files.rename(report.path, path)  # it appears locked
        told, size = _told(folder, write_files)
        data = json.dumps(told).encode()
        report.reserve(len(data))
        report.write_at(0, data)
        report.sync()
    return size


def _is_committed(job: Job, folder: Path) -> bool:
    """Wait until the first process has committed ``folder``, or has failed or died."""
    while not files.exists(job.target / MANIFEST):
        try:
            with files.open_file(folder / MANIFEST, follow=False, write=True) as manifest:
                if manifest.lock():
                    return False  # it died
        except FileNotFoundError:
            return files.exists(job.target / MANIFEST)
        except BlockingIOError:
            pass  # it waits for others
        time.sleep(_PAUSE)
    return True


def _told(folder: Path, write_files: Callable[[Path], Written]) -> tuple[Mapping[str, object], int]:
    try:
        written = write_files(folder)
    except OSError as error:
        return {"error": files.explain(error)}, 0
    except CheckpointError as error:
        return {"error": str(error)}, 0
    pieces = [dump_piece(piece) for piece in written.pieces]
    told = {"files": written.files, "hashes": written.hashes, "pieces": pieces}
    return {**told, "num_shared": written.num_shared}, sum(written.files.values())


def begin(folder: Path) -> None:
    """Tell the others that the folder aside is there and locked."""
    files.create(folder / _REPORT.format(0)).close()


def gather(job: Job, folder: Path, written: Written, is_orphan: Callable[[], bool]) -> None:
    """Wait for the reports of all others, and add what they say to ``written``.

    Raises ``CheckpointError`` if one of them failed or died.
    """
    for rank in range(1, job.world_size):
        path = folder / _REPORT.format(rank)
        told = _report(path, rank, is_orphan)
        if "error" in told:
            raise CheckpointError(f"cannot save {job.target}: process {rank}: {told['error']}")
        written.files |= told["files"]
        written.hashes |= told["hashes"]
        written.pieces += [parse_piece(piece, str(path)) for piece in told["pieces"]]
        written.num_shared += told["num_shared"]
        files.remove_tree(path)
    files.remove_tree(folder / _REPORT.format(0))


def _folder(job: Job, is_orphan: Callable[[], bool]) -> Path | None:
    """The folder aside, once the first process has locked it; None if another attempt has led to a
    commit, or is being made already."""
    folder, began = _folder_of(job, job.attempt), time.monotonic()
    while not files.exists(folder / _REPORT.format(0)):
        if files.exists(job.target / MANIFEST) or files.exists(_folder_of(job, job.attempt + 1)):
            return None
        for attempt in range(job.attempt):
            _give_up(job, _folder_of(job, attempt))
        if time.monotonic() - began > _patience(is_orphan):
            raise CheckpointError(
                f"cannot save {job.target}: {folder.name} does not appear; do all machines see the "
                "same folder?"
            )
        time.sleep(_PAUSE)
    return folder


def _folder_of(job: Job, attempt: int) -> Path:
    nonce = job.nonce_of(attempt)
    assert nonce is not None
    return part_of(job.target, nonce)


def _give_up(job: Job, folder: Path) -> None:
    """Leave an empty report, as of one that died, in an attempt in which there is none."""
    if files.exists(folder / _REPORT.format(0)):
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            files.create(folder / _REPORT.format(job.rank)).close()


def _patience(is_orphan: Callable[[], bool]) -> float:
    """Seconds; when those that train are dead, nobody will begin any more."""
    return _LAST_CHANCE if is_orphan() else _PATIENCE


def _report(path: Path, rank: int, is_orphan: Callable[[], bool]) -> Mapping[str, Any]:
    began = time.monotonic()
    while True:
        try:
            with files.open_file(path, follow=False, write=True) as file:
                is_over = file.lock()  # where there are no locks, patience decides
                data = files.read_all(file, _MAX_REPORT)
            found: Mapping[str, Any] = json.loads(data)
            return found
        except ValueError:  # not all of it is there
            if is_over:
                raise CheckpointError(f"process {rank} died while it saved") from None
        except BlockingIOError:
            began = time.monotonic()  # it writes
        except FileNotFoundError:
            pass
        if time.monotonic() - began > _patience(is_orphan):
            raise CheckpointError(f"process {rank} did not begin to save")
        time.sleep(_PAUSE)
