"""Download a checkpoint from a store: to a temporary folder, verified, then renamed."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from ..checkpoint.disk.commit import temporary_folder
from ..checkpoint.disk.folder import CheckpointFolder
from ..checkpoint.disk.manifest import MANIFEST, Manifest
from ..checkpoint.reading.verification import Report, problems_in
from ..errors import CheckpointError
from ..storage import files
from ..storage.parallel_work import in_parallel
from .listing import read_manifest, wrong_length
from .remote_folder import Contents, readable
from .retry import MissingError, StoreError
from .store import Store

logger = logging.getLogger(__name__)
_WORKERS = 8
_RANGE = 16 << 20  # bytes asked for at a time
_TRIES = 2  # a file that arrives damaged may have been damaged on its way


class DamagedError(CheckpointError):
    """The checkpoint in the store is incomplete or damaged."""


def download(store: Store, name: str, root: Path) -> Path:
    """Download the checkpoint ``name`` of the run to ``root/name``, and return that.

    Raises ``DamagedError`` if it is incomplete, or its hashes do not match.
    """
    text, manifest = _manifest(store, name)
    size = sum(manifest.files.values())
    logger.info("downloading %s (%s) from %s", name, readable(size), store.address)
    doing = f"cannot download {name} to {root}"
    with files.raising(CheckpointError, doing):
        files.make_folder(root)
    with files.raising(CheckpointError, doing), temporary_folder(root / name) as part:
        for file, num_bytes in manifest.files.items():  # so that a full disk shows at once
            files.make_folder((part.folder / file).parent)
            with files.create(part.folder / file) as created:
                created.reserve(num_bytes)
        _fetch_sound(store, name, CheckpointFolder(part.folder, manifest))
        part.commit(root / name, text)
    return root / name


def _manifest(store: Store, name: str) -> tuple[bytes, Manifest]:
    """The manifest, which must match the listed files."""
    there = Contents(store.list(name))
    if MANIFEST not in there.inside(name):
        raise DamagedError(f"{store.address.inside(name)} was never committed: no {MANIFEST}")
    try:
        text, manifest = read_manifest(store, there, name)
    except StoreError:
        raise
    except CheckpointError as error:
        raise DamagedError(str(error)) from error
    if wrong := wrong_length(manifest, there, name):
        raise DamagedError(f"{store.address.inside(name)}/{wrong}")
    return text, manifest


def verify(store: Store, name: str, *, full: bool) -> Report:
    """Check a checkpoint in the store: its lengths; with ``full`` a temporary download of it."""
    report = Report(Path(name), checked="every byte checked" if full else "lengths checked")
    try:
        if not full:
            _manifest(store, name)
            return report
        with tempfile.TemporaryDirectory(prefix="surefoot-verify-") as folder:
            download(store, name, Path(folder))
    except DamagedError as error:
        report.problems.append(str(error))
    return report


def _fetch_sound(store: Store, name: str, checkpoint: CheckpointFolder) -> None:
    """Download all files, and retry those whose hashes do not match."""
    wanted, problems = set(checkpoint.manifest.files), {}
    for _ in range(_TRIES):
        _fetch(store, name, checkpoint, wanted)
        problems = {file: list(problems_in(checkpoint, file)) for file in sorted(wanted)}
        wanted = {file for file, found in problems.items() if found}
        if not wanted:
            return
    first = next(found[0] for found in problems.values() if found)
    said = first.replace(str(checkpoint.path), str(store.address.inside(name)))
    raise DamagedError(said)


def _fetch(store: Store, name: str, checkpoint: CheckpointFolder, wanted: set[str]) -> None:
    ranges = [
        (file, start, min(start + _RANGE, size))
        for file, size in sorted(checkpoint.manifest.files.items())
        if file in wanted
        for start in range(0, size, _RANGE)
    ]
    opened = {file: files.open_file(checkpoint.path / file, write=True) for file in wanted}

    def fetch(part: tuple[str, int, int]) -> None:
        file, start, stop = part
        opened[file].write_at(start, store.read_range(f"{name}/{file}", start, stop))

    try:
        in_parallel(fetch, ranges, _WORKERS)
        for file in opened.values():
            file.sync()
    except MissingError as error:
        raise DamagedError(str(error)) from error
    finally:
        for file in opened.values():
            file.close()
