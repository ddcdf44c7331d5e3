"""Incremental saves: files that would equal the parent's are not written again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ...errors import CheckpointError
from ...storage import files
from ...storage.disk_usage import num_names
from ..disk.folder import CheckpointFolder, open_checkpoint
from ..disk.manifest import MANIFEST, Piece
from .job import Content, Job, Shard


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
    name = _of_same_head(parent, shard)
    if name is None:
        return None
    saved = _counterparts(parent.manifest.pieces_in(name), shard)
    if saved is None or any(content.hash(shard, p.key) != p.hash for p in saved):
        return None
    try:
        with parent.tensors(name) as file:
            for piece in saved:
                parent.check_stored(file, piece)
    except (CheckpointError, OSError):
        return None
    return name


def link(
    parent: CheckpointFolder, name: str, shard: Shard, folder: Path, most: int
) -> list[Piece] | None:
    """Give ``shard`` the parent's file ``name``: its pieces, or None if the disk cannot share, or
    if ``most`` checkpoints share the file already: damage to it would be damage to all of them."""
    if num_names(parent.path / name) >= most:
        return None
    new = folder / shard.plan.name
    make_parent(folder, shard.plan.name)
    return list(_renamed(parent, name, shard)) if files.share(parent.path / name, new) else None


def _renamed(parent: CheckpointFolder, name: str, shard: Shard) -> Iterator[Piece]:
    for piece in parent.manifest.pieces_of_file.get(name, ()):
        yield replace(piece, tensor=f"{shard.role}/{piece.key}", file=shard.plan.name)


def _of_same_head(parent: CheckpointFolder, shard: Shard) -> str | None:
    wanted = files.digest(shard.plan.head), shard.plan.header.file_size
    manifest = parent.manifest
    return next((n for n, s in manifest.files.items() if (manifest.hashes[n], s) == wanted), None)


def _counterparts(saved: Mapping[str, tuple[Piece, ...]], shard: Shard) -> list[Piece] | None:
    """The parent's pieces that are the same boxes as those that this rank writes."""
    if shard.share is None:
        found = [pieces[0] for pieces in saved.values() if len(pieces) == 1]
        return found if len(found) == len(saved) else None
    boxes = shard.share.boxes.items()
    found = [piece for key, box in boxes for piece in saved[key] if piece.box == box]
    return found if len(found) == len(boxes) else None


def make_parent(folder: Path, name: str) -> None:
    """Create a rank's folder in ``folder``, but not ``folder``, which may have been given up."""
    parent = (folder / name).parent
    if parent != folder and not files.is_folder(parent):
        files.new_folder(parent)
