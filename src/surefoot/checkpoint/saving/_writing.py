"""Write a job, everything of a future checkpoint except the bytes of its tensors, to a temporary
folder; commit it, then delete what it replaces. No torch here: so the writer process starts in a
tenth of a second.

The bytes of tensors come from a ``Content``: live tensors (``preparation``), or the
``snapshot_buffer``. Files that would equal the parent's are not written again.

In a joint save every rank writes its own boxes and a report; rank 0 waits for all reports and
commits. Each rank writes files of its own, or its part of shared files. Rank 0 creates shared
files, and then lets the others start. Before that, they may have reported which files differ from
the parent checkpoint. How the ranks communicate: ``_joint``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ...errors import CheckpointError, explain
from ...parallel.sharding import Box
from ...storage import files
from ..apart import Apart
from ..disk.commit import delete, refuse_existing, step_of, temporary_folder
from ..disk.folder import CheckpointFolder, open_checkpoint
from ..disk.grid import BLOCK, HASH_LIST, Grid, parse_grid
from ..disk.manifest import (
    MANIFEST,
    Kind,
    Layout,
    Manifest,
    Piece,
    check_consistent,
    dump,
    dump_piece,
    parse_piece,
)
from ..disk.retention import pinned
from ..disk.tensorfile import FilePlan, explained
from ._grid_plan import hash_list
from ._joint import Meeting, Report, SharedFolder

MOST_ATTEMPTS = 2  # to write a job of which a process was killed, or one that several write


@dataclass(frozen=True)
class WriteShare:
    """The part of a file that one of several ranks writes."""

    boxes: Mapping[str, Box]  # of the whole tensors in it, by key
    has_head: bool  # whether it writes what precedes the tensors


@dataclass(frozen=True)
class Shard:
    """One file of tensors to write."""

    role: str  # model, optimizer or state
    plan: FilePlan
    share: WriteShare | None = None  # if several processes write it


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to write where, and what to delete once it is committed."""

    root: Path
    step: int
    kind: Kind
    created: str  # UTC, ISO 8601
    versions: Mapping[str, str]
    shards: Sequence[Shard]
    small: Mapping[str, bytes]  # the other files, by name
    parent: str | None = None  # the checkpoint this run went on from
    forget: Sequence[str] = ()  # checkpoints under ``root`` that this one takes the place of
    layout: Layout = "full"
    rank: int = 0  # which process this is of those that write the checkpoint together
    world_size: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)
    nonce: str | None = None  # of the folder aside, on which they have agreed
    attempt: int = 0  # how often it has failed; a folder aside for each
    share: bool = True  # files equal to the parent's are linked instead of written again
    beside: Sequence[str] = ()  # files and folders under ``root`` to flush before the commit
    makes_root: bool = True  # False if ``root`` must exist: a run is never divided
    most_sharing: int = 8  # checkpoints that may have one file in common
    name: str | None = None  # of the folder, if it is not checkpoint-{step}
    apart: Apart | None = None  # where ranks save together that have no folder in common
    grid: Mapping[str, Any] | None = None  # axes and rules, as in a manifest of many ranks

    @property
    def is_joint(self) -> bool:
        """Whether several ranks write the same files, at least an adapter's."""
        has_common_files = self.layout == "full" or self.kind == "adapter"
        return self.nonce is not None and self.apart is None and has_common_files

    @property
    def is_repeated_by_all(self) -> bool:
        """Whether all ranks write again if one has failed. Not apart, where the attempt of each
        repeats what may pass."""
        return self.nonce is not None and self.apart is None

    @property
    def may_share(self) -> bool:
        """Whether files may be shared with the parent, on which all ranks agree."""
        return self.share and self.parent is not None

    @property
    def target(self) -> Path:
        """The folder of the future checkpoint."""
        return self.root / (self.name or f"checkpoint-{self.step}")

    def nonce_of(self, attempt: int) -> str | None:
        """The part of the temporary folder's name on which ranks agree, of one attempt."""
        return None if self.nonce is None else f"{self.nonce}{attempt:x}"


@dataclass
class Written:
    """The content of the folder so far."""

    files: dict[str, int] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    num_shared: int = 0
    linked: dict[str, str] = field(default_factory=dict)  # the names that files have in the parent
    num_bytes: int = 0  # of all pieces, also of those in a hash list

    @property
    def report(self) -> Report:
        """As rank 0 reads it."""
        return {**vars(self), "pieces": [dump_piece(piece) for piece in self.pieces]}

    def add(self, report: Report, where: str) -> None:
        """Add what another rank has written."""
        self.files |= report["files"]
        self.hashes |= report["hashes"]
        self.pieces += [parse_piece(piece, where) for piece in report["pieces"]]
        self.num_shared += report["num_shared"]


class Content(Protocol):
    """The bytes of a job's tensors."""

    def write(self, shard: Shard, file: files.File) -> Mapping[str, str]:
        """Write and flush the file; returns the hash of each tensor's bytes by name."""

    def hash(self, shard: Shard, name: str) -> str:
        """The hash of one tensor's bytes."""

    def blocks(self, shard: Shard, name: str, size: int) -> Sequence[str]:
        """The hash of each ``size`` of these bytes."""


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint."""

    path: Path
    num_bytes: int  # of all its files
    num_shared: int = 0  # of these, bytes that lie in files it shares with its parent
    seconds: float = 0.0  # from the first byte to the commit
    replaced: Sequence[str] = ()  # names of older checkpoints that it has taken the place of
    problem: str | None = None  # why one of these could not be removed
    is_committed: bool = True  # as far as a process knows that is not the first


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
    meeting = meeting_of(job, is_orphan)
    if meeting is not None and job.rank > 0:
        with files.raising(CheckpointError, f"cannot save {target}"):
            num_bytes, is_committed = write_own_part(
                meeting, lambda: write_files(job, content, meeting.folder, meeting)
            )
        seconds = time.monotonic() - began
        return Saved(target, num_bytes, 0, seconds, is_committed=is_committed)
    with files.raising(CheckpointError, f"cannot save {target}"):
        if job.attempt and (size := _size_of(job)) is not None:  # the writer died after the commit
            return Saved(target, size, 0, time.monotonic() - began, job.forget, drop_replaced(job))
        refuse_existing(target)
        if job.makes_root:
            files.make_folder(job.root)
        with temporary_folder(target, job.nonce_of(job.attempt)) as part:
            if started is not None:
                started()
            if meeting is not None:
                meeting.announce()
            written = write_files(job, content, part.folder, meeting)
            if meeting is not None:  # others write their part
                for rank, report in enumerate(meeting.reports(), 1):
                    written.add(report, f"report of rank {rank}")
                # Reports come from other machines: what all have
                # written must cover each tensor once.
                check_consistent(manifest_of(job, written), str(target))
            _flush(job)
            part.commit(target, dump(manifest_of(job, written)))
    # Old checkpoints go after the commit: until then one of them may be the only whole one.
    size = sum(written.files.values())
    seconds = time.monotonic() - began
    return Saved(target, size, written.num_shared, seconds, job.forget, drop_replaced(job))


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
    # The time tells this save from an older one of the same step.
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
        grid=grid_of(job),
    )


def grid_of(job: Job) -> Grid | None:
    """The grid by whose rules ``job`` is written; None if there are none."""
    return None if job.grid is None else parse_grid(job.grid, job.mesh, "the plan of the save")


def drop_replaced(job: Job) -> str | None:
    """Delete what the new checkpoint replaces; returns errors, which do not undo the save."""
    try:
        pins = pinned(job.root) if job.forget else set()  # also of what was pinned meanwhile
        for name in job.forget:
            if step_of(job.root / name) not in pins and files.exists(job.root / name):
                delete(job.root / name)
    except OSError as error:
        return f"cannot delete an old checkpoint: {explain(error)}"
    except CheckpointError as error:
        return f"cannot delete old checkpoints: {error}"
    return None


def meeting_of(job: Job, is_orphan: Callable[[], bool]) -> SharedFolder | None:
    """Where the ranks of ``job`` meet; None if one writes alone."""
    nonces = [job.nonce_of(attempt) for attempt in range(job.attempt + 2)]
    agreed = [nonce for nonce in nonces if nonce is not None]
    if not agreed:
        return None
    return SharedFolder(job.target, agreed, job.attempt, job.rank, job.world_size, is_orphan)


def write_own_part(meeting: Meeting, write_files: Callable[[], Written]) -> tuple[int, bool]:
    """Write and report the files of a rank other than 0; the bytes, and if they are committed."""
    num_bytes = 0

    def work() -> Report:
        nonlocal num_bytes
        try:
            written = write_files()
        except OSError as error:
            return {"error": explain(error)}
        except CheckpointError as error:
            return {"error": str(error)}
        num_bytes = written.num_bytes
        return written.report

    if meeting.join():
        meeting.report(work)
    return num_bytes, meeting.ended()


def write_files(
    job: Job, content: Content, folder: Path, meeting: Meeting | None = None
) -> Written:
    """Write and flush all files except the manifest. Space for the large ones is reserved first,
    so that a full disk is found before the first byte is written.

    Of files that all ranks write, rank 0 learns from the others which ones differ from the parent's
    (``changed``), creates those that cannot be linked, and lets the others start.
    """
    written, parent = Written(), parent_of(job)

    def link(shard: Shard) -> bool:
        """Link ``shard`` to an equal file of the parent, if there is one that may be shared."""
        name = None if parent is None else equal_file(parent, shard, content)
        if parent is None or name is None:
            return False
        if files.num_names(parent.path / name) >= job.most_sharing:
            return False  # damage to a file of many checkpoints would be damage to all of them
        make_parent(folder, shard.plan.name)
        if not files.share(parent.path / name, folder / shard.plan.name):
            return False
        _note_file(written, shard)
        written.num_shared += shard.plan.header.file_size
        written.linked[shard.plan.name] = name
        written.pieces += [
            replace(piece, tensor=f"{shard.role}/{piece.key}", file=shard.plan.name)
            for piece in parent.manifest.pieces_of(name)
        ]
        return True

    whole_files = [shard for shard in job.shards if shard.share is None and not link(shard)]
    joint_files = [shard for shard in job.shards if shard.share is not None]
    if meeting is None or not job.is_joint:
        _reserve(folder, whole_files)
    elif job.rank == 0:
        changed = meeting.proposed() if job.may_share else set()
        joint_files = [s for s in joint_files if s.plan.name in changed or not link(s)]
        _reserve(folder, [*whole_files, *joint_files])
        meeting.begin([shard.plan.name for shard in joint_files])
    else:
        _reserve(folder, whole_files)
        if job.may_share:
            equal = {s.plan.name for s in joint_files if parent and equal_file(parent, s, content)}
            changed = {shard.plan.name for shard in joint_files} - equal
            meeting.propose(sorted(changed))
        created = meeting.begun()  # the others have been linked to the parent's
        joint_files = [shard for shard in joint_files if shard.plan.name in created]

    for shard in whole_files:
        with files.open_file(folder / shard.plan.name, follow=False, write=True) as file:
            _write_tensors(written, shard, content, file)
    for shard in joint_files:
        with files.open_to_write(folder / shard.plan.name) as file:
            _write_tensors(written, shard, content, file)
    small = dict(job.small)
    written.num_bytes = sum(piece.num_bytes for piece in written.pieces)
    if (grid := grid_of(job)) is not None:
        name, shards = HASH_LIST.format(job.rank), {shard.plan.name: shard for shard in job.shards}
        small[name], written.pieces = hash_list(
            written.pieces,
            grid,
            job.rank,
            lambda piece: content.blocks(shards[piece.file], piece.key, BLOCK),
        )
        make_parent(folder, name)
    for name, data in sorted(small.items()):
        path = folder / name
        if path.parent != folder:
            files.make_folder(path.parent)
        files.write_new(path, data)
        written.files[name] = len(data)
        written.hashes[name] = files.digest(data)
    return written


def _write_tensors(written: Written, shard: Shard, content: Content, file: files.File) -> None:
    file.bypass_cache()
    note(written, shard, content.write(shard, file))


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
    # Of the head alone: a rank that writes only its boxes cannot hash a whole file, and who reads
    # only a part could not use that hash. Tensors have hashes of their own (docs/decisions/0010).
    written.hashes[shard.plan.name] = files.digest(shard.plan.head)


def parent_of(job: Job) -> CheckpointFolder | None:
    """The previous checkpoint, if its files may be shared."""
    if not job.share or job.parent is None or not files.exists(job.root / job.parent / MANIFEST):
        return None
    try:
        return open_checkpoint(job.root / job.parent, is_part=job.apart is not None)
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
        num_wanted = len(shard.plan.header.entries)
        saved = [p[0] for p in by_key.values() if len(p) == 1]
    else:
        boxes = shard.share.boxes
        num_wanted = len(boxes)
        saved = [p for key, box in boxes.items() for p in by_key[key] if p.box == box]
    if len(saved) != num_wanted or any(content.hash(shard, p.key) != p.hash for p in saved):
        return None
    # Read again, from the disk: a file that has rotted there must not be handed on to a checkpoint
    # whose own bytes in memory are good (docs/decisions/0016).
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
