"""Checkpoints in a store: listed from one listing, verified where they are, and downloaded to a
temporary folder, verified, then renamed."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import replace
from pathlib import Path

from ...checkpoint.disk import strict_json, trainer_state
from ...checkpoint.disk.commit import check_step, step_of, temporary_folder
from ...checkpoint.disk.folder import CheckpointFolder
from ...checkpoint.disk.manifest import MANIFEST, Manifest, parse
from ...checkpoint.disk.trainer_state import TrainerStateFile
from ...checkpoint.looking.listing import CheckpointLine, line_of
from ...checkpoint.reading.verification import Report, problems_in
from ...errors import CheckpointError
from ...storage import files
from ...storage.address import Address
from ...storage.files import digest
from ...storage.parallel_work import in_parallel
from .store import Contents, MissingError, Store, StoreError, readable


def list_store(address: Address, *, seconds: float = 60) -> list[CheckpointLine]:
    """One line per checkpoint, oldest first; that of a checkpoint is a list of one. No hashes."""
    is_one = step_of(Path(address.name)) >= 0
    store = Store(address.parent if is_one else address, seconds=seconds)
    there = Contents(store.list(address.name if is_one else ""))
    found = [_line(store, there, name) for _, name in sorted(there.committed.items())]
    best = next((state.best_step for line, state in reversed(found) if line.problem is None), None)
    lines = [replace(line, is_best=line.step == best is not None) for line, _ in found]
    why = "never committed: an interrupted upload or deletion"
    return lines + [
        CheckpointLine(Path(name), problem=why) for _, name in sorted(there.uncommitted.items())
    ]


def _line(store: Store, there: Contents, name: str) -> tuple[CheckpointLine, TrainerStateFile]:
    try:
        _, manifest = read_manifest(store, there, name)
    except StoreError:
        raise
    except CheckpointError as error:
        return CheckpointLine(
            Path(name), step=step_of(Path(name)), problem=str(error)
        ), TrainerStateFile()
    state = _state(store, name, manifest)
    return line_of(Path(name), manifest, state, wrong_length(manifest, there, name)), state


def read_manifest(store: Store, there: Contents, name: str) -> tuple[bytes, Manifest]:
    """The manifest of a checkpoint, as bytes and parsed."""
    file = f"{name}/{MANIFEST}"
    where = str(store.address.inside(file))
    if there.files[file] > strict_json.MAX_BYTES:
        raise CheckpointError(f"{where}: {there.files[file]} bytes are too many for a manifest")
    text = store.read(file)
    manifest = parse(text, where)
    check_step(Path(name), str(store.address.inside(name)), manifest.step)
    return text, manifest


def wrong_length(manifest: Manifest, there: Contents, name: str) -> str | None:
    """The first file that is missing in the store, or whose length differs from the manifest."""
    found = there.inside(name)
    for file, size in manifest.files.items():
        if found.get(file) != size:
            what = f"{found[file]} bytes" if file in found else "missing"
            return f"{file}: {what}, expected {size} bytes"
    return None


def _state(store: Store, name: str, manifest: Manifest) -> TrainerStateFile:
    file = trainer_state.NAME
    if manifest.files.get(file, 0) > strict_json.MAX_BYTES:
        return TrainerStateFile()
    try:
        data = store.read(f"{name}/{file}") if file in manifest.files else b"{}"
        if file in manifest.hashes and digest(data) != manifest.hashes[file]:
            return TrainerStateFile()
        return trainer_state.read(strict_json.parse_object(data, file))
    except CheckpointError:
        return TrainerStateFile()


logger = logging.getLogger(__name__)
_WORKERS = 8
_RANGE = 16 << 20  # bytes asked for at a time
_TRIES = 2  # a file that arrives damaged may have been damaged on its way


class StoredDamageError(CheckpointError):
    """The checkpoint in the store is incomplete or damaged."""


def download(store: Store, name: str, root: Path) -> Path:
    """Download the checkpoint ``name`` of the run to ``root/name``, and return that.

    Raises ``StoredDamageError`` if it is incomplete, or its hashes do not match.
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
        raise StoredDamageError(f"{store.address.inside(name)} was never committed: no {MANIFEST}")
    try:
        text, manifest = read_manifest(store, there, name)
    except StoreError:
        raise
    except CheckpointError as error:
        raise StoredDamageError(str(error)) from error
    if wrong := wrong_length(manifest, there, name):
        raise StoredDamageError(f"{store.address.inside(name)}/{wrong}")
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
    except StoredDamageError as error:
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
    raise StoredDamageError(said)


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
        raise StoredDamageError(str(error)) from error
    finally:
        for file in opened.values():
            file.close()


def verify_store(checkpoint: Address, *, full: bool, seconds: float = 60) -> Report:
    """Check lengths and manifest; with ``full`` every byte. Raises ``StoreError``."""
    if step_of(Path(checkpoint.name)) < 0:
        raise CheckpointError(f"{checkpoint}: expected the URL of a checkpoint, …/checkpoint-N")
    return verify(Store(checkpoint.parent, seconds=seconds), checkpoint.name, full=full)


def verified_line(run: Address, line: CheckpointLine, *, seconds: float = 60) -> CheckpointLine:
    """The same line, every byte checked. ``run`` may be the address of the checkpoint itself."""
    if line.problem is not None:
        return line
    address = run if run.name == line.path.name else run.inside(line.path.name)
    report = verify_store(address, full=True, seconds=seconds)
    if report.ok:
        return replace(line, verified="every byte")
    return replace(line, problem=report.problems[0].removeprefix(f"{address}/"))
