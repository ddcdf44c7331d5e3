"""Write a checkpoint aside, all of it, then commit it; afterwards forget what it replaces.

The bytes of tensors come from a ``Content``: live tensors (``save``), or the arena that a snapshot
was copied into (``background``). No torch here: the process that writes in the background starts
in a tenth of a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from .. import files
from ..errors import CheckpointError
from .commit import aside, drop, refuse_existing
from .folder import CheckpointFolder, open_checkpoint
from .index import MANIFEST, Manifest, Piece, dump
from .job import Job, Saved, Shard
from .sharding import explained
from .together import Written, begin, contribute, gather


class Content(Protocol):
    """Where the bytes of a job's tensors come from."""

    def write(self, shard: Shard, file: files.File) -> Mapping[str, str]:
        """Fill and flush the file; the hash of each tensor's bytes by name."""

    def hash(self, shard: Shard, name: str) -> str:
        """The hash of one tensor's bytes."""


def write(
    job: Job,
    content: Content,
    started: Callable[[], None] | None = None,
    is_orphan: Callable[[], bool] = lambda: False,
) -> Saved:
    """Write and commit ``job``; it is on the disk when this returns.

    Of several processes that write a checkpoint together, the first commits it, once all others
    have reported their part; these return when it has.

    ``started`` is called once the folder aside is there and locked; it may raise to give up.
    Raises ``CheckpointError``, leaving nothing behind, if the checkpoint exists already or the disk
    fails.
    """
    began = time.monotonic()
    target = job.target
    if job.rank > 0:
        with files.raising(CheckpointError, f"cannot save {target}"):
            own, done = contribute(job, lambda path: write_files(job, content, path), is_orphan)
        return Saved(target, own, 0, time.monotonic() - began, is_committed=done)
    with files.raising(CheckpointError, f"cannot save {target}"):
        if job.attempt and (size := _size_of(job)) is not None:  # the writer died after the commit
            return Saved(target, size, 0, time.monotonic() - began, _forget(job))
        refuse_existing(target)
        with aside(target, job.nonce_of(job.attempt)) as part:
            if started is not None:
                started()
            if job.nonce is not None:
                begin(part.folder)
            written = write_files(job, content, part.folder)
            if job.nonce is not None:  # others write their part
                gather(job, part.folder, written, is_orphan)
            part.commit(target, dump(_manifest(job, written)))
    size = sum(written.files.values())
    seconds = time.monotonic() - began
    return Saved(target, size, written.num_shared, seconds, _forget(job))


def _size_of(job: Job) -> int | None:
    """The bytes of the checkpoint, if ``job`` has been committed."""
    if not files.exists(job.target / MANIFEST):
        return None
    manifest = open_checkpoint(job.target).manifest
    return sum(manifest.files.values()) if manifest.created == job.created else None


def _manifest(job: Job, written: Written) -> Manifest:
    return Manifest(
        step=job.step,
        kind=job.kind,
        created=job.created,
        versions=job.versions,
        files=written.files,
        hashes=written.hashes,
        pieces=written.pieces,
        parent=job.parent,
        layout=job.layout,
        world_size=job.world_size,
        mesh=job.mesh,
    )


def _forget(job: Job) -> str | None:
    """Drop what the new checkpoint replaces; what went wrong, which does not undo the save."""
    try:
        for name in job.forget:
            if files.exists(job.root / name):
                drop(job.root / name)
    except OSError as error:
        return f"cannot remove an old checkpoint: {files.explain(error)}"
    return None


def write_files(job: Job, content: Content, folder: Path) -> Written:
    """Write and flush all files but the manifest. Space for the large ones is claimed first."""
    written = Written()
    own = _share(job, content, folder, written)
    for shard in own:
        files.make_folder((folder / shard.plan.name).parent)
        with files.create(folder / shard.plan.name) as file:
            file.reserve(shard.plan.header.file_size)
    for shard in own:
        path = folder / shard.plan.name
        with files.open_file(path, follow=False, write=True) as file:
            file.bypass_cache()
            _note(written, shard, content.write(shard, file))
    for name, data in sorted(job.small.items()):
        path = folder / name
        if path.parent != folder:
            files.make_folder(path.parent)
        files.write_new(path, data)
        written.files[name] = len(data)
        written.hashes[name] = files.digest(data)
    return written


def _note(written: Written, shard: Shard, hashes: Mapping[str, str]) -> None:
    plan = shard.plan
    written.files[plan.name] = plan.header.file_size
    written.hashes[plan.name] = files.digest(plan.head)
    written.pieces += [
        Piece(
            tensor=f"{shard.role}/{name}",
            dtype=plan.header.entries[name].dtype,
            shape=shape,
            box=box,
            file=plan.name,
            key=name,
            hash=hashes[name],
        )
        for name, (shape, box) in explained(plan.header).items()
    ]


def _share(job: Job, content: Content, folder: Path, written: Written) -> Sequence[Shard]:
    """Link the files that are the parent's to the last byte; the shards that are left to write."""
    parent = _parent(job)
    if parent is None:
        return job.shards
    left = []
    for shard in job.shards:
        hashes = _link(parent, shard, content, folder)
        if hashes is None:
            left.append(shard)
        else:
            _note(written, shard, hashes)
            written.num_shared += shard.plan.header.file_size
    return left


def _parent(job: Job) -> CheckpointFolder | None:
    if not job.share or job.parent is None or not files.exists(job.root / job.parent / MANIFEST):
        return None
    try:
        return open_checkpoint(job.root / job.parent)
    except CheckpointError:
        return None  # damaged since; nothing is lost by writing all of it


def _link(
    parent: CheckpointFolder, shard: Shard, content: Content, folder: Path
) -> Mapping[str, str] | None:
    """Link ``shard`` to the parent's equal file; its hashes, or None if there is no such file."""
    head = files.digest(shard.plan.head)
    for name, size in parent.manifest.files.items():
        if parent.manifest.hashes[name] != head or size != shard.plan.header.file_size:
            continue
        saved = {key: piece.hash for key, piece in parent.manifest.pieces_in(name).items()}
        is_equal = all(content.hash(shard, key) == saved[key] for key in shard.plan.header.entries)
        if is_equal and _is_sound(parent, name, saved):
            new = folder / shard.plan.name
            files.make_folder(new.parent)
            return saved if files.share(parent.path / name, new) else None
    return None


def _is_sound(parent: CheckpointFolder, name: str, saved: Mapping[str, str]) -> bool:
    """Whether the parent's file still holds what was saved: a bad sector must not be inherited."""
    try:
        with parent.tensors(name) as file:
            return all(file.hash(key) == expected for key, expected in saved.items())
    except (CheckpointError, OSError):
        return False
