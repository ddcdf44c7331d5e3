"""Several processes write one checkpoint: each its own files, and a report; the first commits.

A report, ``.rank_00003.json`` in the folder aside, is locked by its writer until it is whole. So
the first process tells one that still writes from one that died, whatever machine it ran on.
"""

from __future__ import annotations

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
_PATIENCE = 600.0  # seconds for another process to begin
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
    job: Job, write_files: Callable[[Path], Written], started: Callable[[], None] | None
) -> int:
    """Write the files of a process that is not the first, and report them; their bytes.

    What goes wrong is reported as well: the first process tells it.
    """
    folder = _folder(job)
    path = folder / _REPORT.format(job.rank)
    with files.create(path.with_suffix(".part")) as report:
        report.lock()
        files.rename(report.path, path)  # it appears locked
        if started is not None:
            started()
        told, size = _told(folder, write_files)
        data = json.dumps(told).encode()
        report.reserve(len(data))
        report.write_at(0, data)
        report.sync()
    return size


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


def _folder(job: Job) -> Path:
    """The folder aside, once the first process has made it."""
    assert job.nonce is not None
    folder, began = part_of(job.target, job.nonce), time.monotonic()
    while not files.exists(folder / MANIFEST):
        if time.monotonic() - began > _PATIENCE:
            raise CheckpointError(
                f"cannot save {job.target}: {folder.name} does not appear; do all machines see the "
                "same folder?"
            )
        time.sleep(_PAUSE)
    return folder


def _report(path: Path, rank: int, is_orphan: Callable[[], bool]) -> Mapping[str, Any]:
    began = time.monotonic()
    while True:
        try:
            with files.open_file(path, follow=False, write=True) as file:
                file.lock()
                data = files.read_all(file, _MAX_REPORT)
            if data:
                found: Mapping[str, Any] = json.loads(data)
                return found
            raise CheckpointError(f"process {rank} died while it saved")
        except FileNotFoundError:
            # When those that train are dead, nobody will begin any more.
            patience = _LAST_CHANCE if is_orphan() else _PATIENCE
            if time.monotonic() - began > patience:
                raise CheckpointError(f"process {rank} did not begin to save") from None
        except BlockingIOError:
            pass  # it writes
        time.sleep(_PAUSE)
