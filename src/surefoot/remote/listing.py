"""List the checkpoints of a run in a store, from one listing, their manifests and their logs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..checkpoint.disk import strict_json, trainer_state
from ..checkpoint.disk.commit import check_step, step_of
from ..checkpoint.disk.manifest import MANIFEST, Manifest, parse
from ..checkpoint.disk.trainer_state import TrainerStateFile
from ..checkpoint.looking.listing import CheckpointLine, line_of
from ..errors import CheckpointError
from ..storage.address import Address
from ..storage.files import digest
from .remote_folder import Contents
from .retry import StoreError
from .store import Store


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
