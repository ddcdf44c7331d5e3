"""Write a checkpoint to a temporary folder, commit it, then delete what it replaces.

The bytes of tensors come from a ``Content``: live tensors (``preparation``), or the
``snapshot_buffer``. Files that would equal the parent's are not written again. No torch here: so
the writer process starts in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...errors import CheckpointError
from ...storage import files
from ...storage.disk_usage import num_names
from ..disk.commit import delete, refuse_existing, step_of, temporary_folder
from ..disk.folder import CheckpointFolder, open_checkpoint
from ..disk.manifest import MANIFEST, Manifest, Piece, check_consistent, dump
from ..disk.retention import pinned
from ..disk.tensorfile import explained
from .job import Content, Job, Saved, Shard
from .joint import (
    Written,
    gather,
    publish_files,
    publish_folder,
    read_changed,
    report_changed,
    wait_for_files,
    write_own_part,
)


def write(
    job: Job,
    content: Content,
    started: Callable[[], None] | None = None,
    is_orphan: Callable[[], bool] = lambda: False,
) -> Saved:
    """Write and commit ``job``; it is on the disk when this returns.

    In a joint save, rank 0 commits once all others have reported their part; these return when it
    has.

    ``started`` is called once the temporary folder exists and is locked; it may raise to abort.
    Raises ``CheckpointError``, leaving nothing behind, if the checkpoint already exists or the disk
    fails.
    """
    began = time.monotonic()
    target = job.target
    if job.rank > 0:
        with files.raising(CheckpointError, f"cannot save {target}"):
            own, done = write_own_part(job, lambda path: write_files(job, content, path), is_orphan)
        return Saved(target, own, 0, time.monotonic() - began, is_committed=done)
    with files.raising(CheckpointError, f"cannot save {target}"):
        if job.attempt and (size := _size_of(job)) is not None:  # the writer died after the commit
            return Saved(target, size, 0, time.monotonic() - began, _forget(job))
        refuse_existing(target)
        if job.makes_root:
            files.make_folder(job.root)
        with temporary_folder(target, job.nonce_of(job.attempt)) as part:
            if started is not None:
                started()
            if job.nonce is not None:
                publish_folder(part.folder)
            written = write_files(job, content, part.folder, is_orphan)
            if job.nonce is not None:  # others write their part
                gather(job, part.folder, written, is_orphan)
                check_consistent(manifest_of(job, written), str(target))
            _flush(job)
            part.commit(target, dump(manifest_of(job, written)))
    size = sum(written.files.values())
    seconds = time.monotonic() - began
    return Saved(target, size, written.num_shared, seconds, _forget(job))


def _flush(job: Job) -> None:
    """Flush the files beside the checkpoints: no step in this one may be missing in them."""
    for path in (job.root / name for name in job.beside):
        inside = [path / name for name in files.names_in(path)]
        for each in inside or [path]:
            with contextlib.suppress(FileNotFoundError), files.open_file(each) as file:
                file.sync()
        if inside:
            files.sync_folder(path)


def _size_of(job: Job) -> int | None:
    """The bytes of the checkpoint, if ``job`` has been committed."""
    if not files.exists(job.target / MANIFEST):
        return None
    manifest = open_checkpoint(job.target).manifest
    return sum(manifest.files.values()) if manifest.created == job.created else None


def manifest_of(job: Job, written: Written) -> Manifest:
    """The manifest of what has been ``written``."""
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
    """Delete what the new checkpoint replaces; returns errors, which do not undo the save."""
    try:
        pins = pinned(job.root) if job.forget else set()  # also of what was pinned meanwhile
        for name in job.forget:
            if step_of(job.root / name) not in pins and files.exists(job.root / name):
                delete(job.root / name)
    except OSError as error:
        return f"cannot delete an old checkpoint: {files.explain(error)}"
    except CheckpointError as error:
        return f"cannot delete old checkpoints: {error}"
    return None


def write_files(
    job: Job, content: Content, folder: Path, is_orphan: Callable[[], bool] = lambda: False
) -> Written:
    """Write and flush all files except the manifest. Space for the large ones is reserved first.

    Of files that all ranks write, rank 0 learns from the others which ones differ from the parent's
    (``changed``), creates those that cannot be linked, and lets the others start.
    """
    written, parent = Written(), parent_of(job)

    def is_linked(shard: Shard) -> bool:
        """Whether ``shard`` is equal to a file of the parent, and has been linked to it."""
        name = None if parent is None else equal_file(parent, shard, content)
        if parent is None or name is None or num_names(parent.path / name) >= job.most_sharing:
            return False  # damage to a file of many checkpoints would be damage to all of them
        make_parent(folder, shard.plan.name)
        if not files.share(parent.path / name, folder / shard.plan.name):
            return False
        _note_file(written, shard)
        written.num_shared += shard.plan.header.file_size
        written.pieces += [
            replace(piece, tensor=f"{shard.role}/{piece.key}", file=shard.plan.name)
            for piece in parent.manifest.pieces_of_file.get(name, ())
        ]
        return True

    to_write = [shard for shard in job.shards if shard.share is None and not is_linked(shard)]
    joint = job.joint_shards
    if job.is_joint and job.rank == 0:
        changed = read_changed(job, folder, is_orphan) if job.may_share else set()
        joint = [s for s in joint if s.plan.name in changed or not is_linked(s)]
        _reserve(folder, [*to_write, *joint])
        publish_files(folder, [shard.plan.name for shard in joint])
    else:
        _reserve(folder, to_write)
    if job.is_joint and job.rank > 0:
        if job.may_share:
            changed = {
                shard.plan.name
                for shard in joint
                if parent is None or equal_file(parent, shard, content) is None
            }
            report_changed(job, folder, sorted(changed))
        created = wait_for_files(folder)
        joint = [shard for shard in joint if shard.plan.name in created]
    for shard in [*to_write, *joint]:
        path = folder / shard.plan.name
        if shard.share is None:
            opened = files.open_file(path, follow=False, write=True)
        else:
            opened = files.open_to_write(path)
        with opened as file:
            file.bypass_cache()
            note(written, shard, content.write(shard, file))
    for name, data in sorted(job.small.items()):
        path = folder / name
        if path.parent != folder:
            files.make_folder(path.parent)
        files.write_new(path, data)
        written.files[name] = len(data)
        written.hashes[name] = files.digest(data)
    return written


def _reserve(folder: Path, shards: Sequence[Shard]) -> None:
    for shard in shards:
        make_parent(folder, shard.plan.name)
        with files.create(folder / shard.plan.name) as file:
            file.reserve(shard.plan.header.file_size)


def note(written: Written, shard: Shard, hashes: Mapping[str, str]) -> None:
    """Add a file, or the part of it that this rank writes, with the ``hashes`` of its tensors."""
    plan, share = shard.plan, shard.share
    boxes = explained(plan.header)
    if share is None or share.has_head:
        _note_file(written, shard)
    if share is not None:
        boxes = {name: (plan.header.entries[name].shape, box) for name, box in share.boxes.items()}
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
        for name, (shape, box) in boxes.items()
    ]


def _note_file(written: Written, shard: Shard) -> None:
    written.files[shard.plan.name] = shard.plan.header.file_size
    written.hashes[shard.plan.name] = files.digest(shard.plan.head)


def parent_of(job: Job) -> CheckpointFolder | None:
    """The previous checkpoint, if its files may be shared."""
    if not job.share or job.parent is None or not files.exists(job.root / job.parent / MANIFEST):
        return None
    try:
        return open_checkpoint(job.root / job.parent)
    except CheckpointError:
        return None  # damaged since; nothing is lost by writing all of it


def equal_file(parent: CheckpointFolder, shard: Shard, content: Content) -> str | None:
    """The parent's file with all that this rank would write of ``shard``, checked again."""
    manifest = parent.manifest
    head = files.digest(shard.plan.head), shard.plan.header.file_size
    equal_heads = (n for n, size in manifest.files.items() if (manifest.hashes[n], size) == head)
    if (name := next(equal_heads, None)) is None:
        return None
    by_key = manifest.pieces_in(name)  # the same boxes as those that this rank writes
    if shard.share is None:
        num_wanted, saved = len(by_key), [p[0] for p in by_key.values() if len(p) == 1]
    else:
        boxes = shard.share.boxes
        num_wanted = len(boxes)
        saved = [p for key, box in boxes.items() for p in by_key[key] if p.box == box]
    if len(saved) != num_wanted or any(content.hash(shard, p.key) != p.hash for p in saved):
        return None
    try:
        with parent.tensors(name) as file:
            for piece in saved:
                parent.check_stored(file, piece)
    except (CheckpointError, OSError):
        return None
    return name


def make_parent(folder: Path, name: str) -> None:
    """Create a rank's folder in ``folder``, but not ``folder``, which may have been given up."""
    parent = (folder / name).parent
    if parent != folder and not files.is_folder(parent):
        files.new_folder(parent)
