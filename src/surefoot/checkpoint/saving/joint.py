"""Joint save: every rank writes its own boxes and a report file; rank 0 waits for all reports and
commits.

Each rank writes files of its own, or its part of shared files. Rank 0 creates shared files, and
then lets the others start (``.begin.json``). Before that, they may have reported which files differ
from the parent checkpoint.

A report, ``.rank_00003.json`` in the temporary folder, is locked by its writer until it is
complete. So rank 0 can distinguish a rank that still writes from one that died, whatever machine it
ran on; the others watch rank 0 by the lock of the manifest. If any rank fails or dies, the attempt
has failed for all, and each of them makes another one, in another folder.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ...errors import CheckpointError
from ...storage import files
from ..disk.commit import part_of
from ..disk.manifest import MANIFEST, Piece, dump_piece, parse_piece
from .job import Job

_REPORT = ".rank_{:05d}.json"
_CHANGED = ".rank_{:05d}.changed.json"
_BEGIN = ".begin.json"
_PAUSE = 0.02  # seconds between two looks
_PATIENCE = 120.0  # seconds for another process to begin; much less than collectives wait
_LAST_CHANCE = 5.0  # the same, when those that train are dead
_MAX_REPORT = 1 << 30
T = TypeVar("T")


@dataclass
class Written:
    """The content of the folder so far."""

    files: dict[str, int] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    num_shared: int = 0


def write_own_part(
    job: Job, write_files: Callable[[Path], Written], is_orphan: Callable[[], bool]
) -> tuple[int, bool]:
    """Write and report the files of a rank other than 0; the bytes, and if they are committed."""
    folder = _folder(job, is_orphan)
    if folder is None:
        return 0, files.exists(job.target / MANIFEST)
    try:
        size = _write(job, folder, write_files)
    except FileNotFoundError:
        size = 0  # the attempt has failed meanwhile, and its folder is being removed
    return size, _is_committed(job, folder)


def _write(job: Job, folder: Path, write_files: Callable[[Path], Written]) -> int:
    path = folder / _REPORT.format(job.rank)
    with files.create(path.with_suffix(".part")) as report:
        report.lock()
        files.rename(report.path, path)  # it appears locked
        told, size = _reported(folder, write_files)
        data = json.dumps(told).encode()
        report.reserve(len(data))
        report.write_at(0, data)
        report.sync()
    return size


def _is_committed(job: Job, folder: Path) -> bool:
    """Wait until rank 0 has committed ``folder``, or has failed or died."""
    while not files.exists(job.target / MANIFEST):
        if _is_abandoned(folder):
            return files.exists(job.target / MANIFEST)
        time.sleep(_PAUSE)
    return True


def _reported(
    folder: Path, write_files: Callable[[Path], Written]
) -> tuple[Mapping[str, object], int]:
    try:
        written = write_files(folder)
    except OSError as error:
        return {"error": files.explain(error)}, 0
    except CheckpointError as error:
        return {"error": str(error)}, 0
    pieces = [dump_piece(piece) for piece in written.pieces]
    told = {"files": written.files, "hashes": written.hashes, "pieces": pieces}
    told |= {"num_shared": written.num_shared}
    return told, sum(piece.num_bytes for piece in written.pieces)


def publish_folder(folder: Path) -> None:
    """Announce to the others that the temporary folder exists and is locked."""
    files.create(folder / _REPORT.format(0)).close()


def gather(job: Job, folder: Path, written: Written, is_orphan: Callable[[], bool]) -> None:
    """Add the reports of all others to ``written``; raises if a rank failed or died."""
    for rank in range(1, job.world_size):
        path = folder / _REPORT.format(rank)
        told = _wait_for(partial(_look, path, rank), rank, is_orphan)
        _refuse_error(job, rank, told)
        written.files |= told["files"]
        written.hashes |= told["hashes"]
        written.pieces += [parse_piece(piece, str(path)) for piece in told["pieces"]]
        written.num_shared += told["num_shared"]
        files.remove_tree(path)
    for name in (_BEGIN, _REPORT.format(0)):
        files.remove_tree(folder / name)


def report_changed(job: Job, folder: Path, names: Sequence[str]) -> None:
    """Report the files of which this rank knows that they differ from the parent's."""
    _put(folder / _CHANGED.format(job.rank), list(names))


def read_changed(job: Job, folder: Path, is_orphan: Callable[[], bool]) -> set[str]:
    """The files that some other rank has reported. Raises as ``gather``."""
    found: set[str] = set()
    for rank in range(1, job.world_size):
        path = folder / _CHANGED.format(rank)

        def look(path: Path = path, rank: int = rank) -> list[str] | None:
            if files.exists(path):
                return _get(path)
            told = _look(folder / _REPORT.format(rank), rank)
            _refuse_error(job, rank, told or {})
            return None

        found |= set(_wait_for(look, rank, is_orphan))
        files.remove_tree(path)
    return found


def publish_files(folder: Path, names: Sequence[str]) -> None:
    """Let the others write their parts of these files, which exist at full length."""
    _put(folder / _BEGIN, list(names))


def wait_for_files(folder: Path) -> list[str]:
    """The files of which this rank writes a part, once rank 0 made them; raises if it died."""
    while not files.exists(folder / _BEGIN):
        if _is_abandoned(folder):
            raise CheckpointError("rank 0 died or aborted before it created the checkpoint files")
        time.sleep(_PAUSE)
    return _get(folder / _BEGIN)


def _is_abandoned(folder: Path) -> bool:
    """Whether the manifest of the temporary folder is no longer locked."""
    try:
        with files.open_file(folder / MANIFEST, follow=False, write=True) as manifest:
            return manifest.lock()
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True


def _put(path: Path, names: list[str]) -> None:
    """A small file that is complete when it appears."""
    part = path.with_suffix(".part")
    with files.create(part) as file:
        file.write_at(0, json.dumps(names).encode())
    files.rename(part, path)


def _get(path: Path) -> list[str]:
    with files.open_file(path, follow=False) as file:
        found: list[str] = json.loads(files.read_all(file, _MAX_REPORT))
    return found


def _refuse_error(job: Job, rank: int, told: Mapping[str, Any]) -> None:
    if "error" in told:
        raise CheckpointError(f"cannot save {job.target}: rank {rank}: {told['error']}")


def _folder(job: Job, is_orphan: Callable[[], bool]) -> Path | None:
    """The temporary folder, once rank 0 has locked it; None if another attempt took over."""
    folder, began = _folder_of(job, job.attempt), time.monotonic()
    while not files.exists(folder / _REPORT.format(0)):
        if files.exists(job.target / MANIFEST) or files.exists(_folder_of(job, job.attempt + 1)):
            return None
        for attempt in range(job.attempt):
            _give_up(job, _folder_of(job, attempt))
        if time.monotonic() - began > _patience(is_orphan):
            raise CheckpointError(
                f"cannot save {job.target}: temporary folder {folder.name} is not visible on "
                "this rank; all machines must share train.output_dir (or train.cache_dir)"
            )
        time.sleep(_PAUSE)
    return folder


def _folder_of(job: Job, attempt: int) -> Path:
    nonce = job.nonce_of(attempt)
    assert nonce is not None
    return part_of(job.target, nonce)


def _give_up(job: Job, folder: Path) -> None:
    """Leave an empty report, as of a rank that died, in an attempt that has none."""
    if files.exists(folder / _REPORT.format(0)):
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            files.create(folder / _REPORT.format(job.rank)).close()


def _patience(is_orphan: Callable[[], bool]) -> float:
    """Seconds to wait; if the training ranks are dead, none will start any more."""
    return _LAST_CHANCE if is_orphan() else _PATIENCE


def _wait_for(look: Callable[[], T | None], rank: int, is_orphan: Callable[[], bool]) -> T:
    """The result of ``look`` once there is one; raises if the rank never starts."""
    began = time.monotonic()
    while True:
        try:
            found = look()
        except FileNotFoundError:
            if time.monotonic() - began > _patience(is_orphan):
                raise CheckpointError(f"rank {rank} did not start to save") from None
            found = None
        if found is not None:
            return found
        time.sleep(_PAUSE)


def _look(path: Path, rank: int) -> Mapping[str, Any] | None:
    """The report of a rank; None while it is writing."""
    try:
        with files.open_file(path, follow=False, write=True) as file:
            is_over = file.lock()
            data = files.read_all(file, _MAX_REPORT)
    except BlockingIOError:
        return None
    try:
        found: Mapping[str, Any] = json.loads(data)
    except ValueError:  # empty, or zeros: space that was reserved
        if not is_over:  # there are no locks here, and patience decides
            raise FileNotFoundError(path) from None
        raise CheckpointError(f"rank {rank} died during the save") from None
    return found
