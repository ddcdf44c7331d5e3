"""Upload a committed checkpoint to a store: its files, then its manifest, which commits it there.

Only files in its manifest are uploaded, not a user's notes. All lengths are compared with a listing
of the store before the manifest is uploaded. The manifest is created, never replaced: an existing
checkpoint is not overwritten by another of its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..checkpoint.disk import strict_json
from ..checkpoint.disk.folder import open_checkpoint
from ..checkpoint.disk.manifest import MANIFEST
from ..checkpoint.reading.verification import verify_checkpoint
from ..errors import CheckpointError
from ..storage import files
from ..storage.parallel_work import in_parallel
from .remote_folder import Contents
from .retry import StoreError
from .store import Store

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
