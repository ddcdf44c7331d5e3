"""A save of ranks whose machines have no folder in common (``save``, which is for all saves).

Each rank writes its part to its own disk, and uploads it to the store of the run, then a report:
its part of the manifest. Rank 0 commits there, once all have reported. Nothing else is exchanged,
by no process group and no connection: so the writer processes finish a save whose trainers have
died, and what was uploaded whole and not committed is committed by the next launch, from the
reports alone.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...errors import CheckpointError
from ...log import announced
from ...parallel.sharding import Box
from ...storage import files
from ...storage.folder_lock import StallWatch
from ..apart import RankPart, inside
from ..disk.commit import delete, temporary_folder
from ..disk.folder import ADAPTER
from ..disk.manifest import Manifest, check_consistent, dump, parse
from ..disk.tensorfile import open_path, plan_save, ranges_of
from ..disk.tensorfile import parse as parse_header
from ..remote import StoredSave, stores
from ..state.roles import MODEL
from ._writing import Content, Job, Saved, drop_replaced, manifest_of, write, write_files

logger = logging.getLogger(__name__)
ALIVE = ".uploading"  # a file whose time shows that a process works
_BEAT = 10.0  # seconds between two changes of it
_PAUSE = 0.2  # seconds between two looks at its lock
_PATIENCE = 60.0  # seconds without a change, after which the process is stopped or hangs
_ADAPTER_NAME = f"{MODEL}/"


def save(
    job: Job,
    content: Content,
    started: Callable[[], None] | None = None,
    is_orphan: Callable[[], bool] = lambda: False,
) -> Saved:
    """Write and commit ``job``, to a folder or to a store; see ``write``."""
    if job.apart is None:
        return write(job, content, started, is_orphan)
    began = time.monotonic()
    part = RankPart(step=job.step, rank=job.rank, world_size=job.world_size, nonce=job.nonce or "")
    stored = stores().save_of(job.apart, part, is_orphan)
    with _alive(job.root):
        try:
            with files.raising(CheckpointError, f"cannot save {job.target}"):
                stored.begin()
                own, equal = _write_part(job, content, started)
            stored.send(job.target, own.files, equal)
            # Of all ranks' rules, once.
            stored.report(dump(replace(own, grid=None) if job.rank else own))
            num_bytes = sum(own.files.values())
            # The others do not wait for the commit. Where rank 0 dies before it, they would wait
            # outside of any collective, and not learn of it; rank 0 says what is committed.
            if job.rank == 0:
                manifest = commit(stored, stored.reports(), str(job.target), job.root)
                num_bytes = sum(manifest.files.values())
        except CheckpointError as error:
            with contextlib.suppress(CheckpointError):  # the first one is the cause
                stored.fail(str(error))
            raise
    seconds = time.monotonic() - began
    problem = drop_replaced(job)
    for path in job.apart.outdated():
        with contextlib.suppress(OSError):  # another rank of this machine does it, too
            files.remove_tree(path)
    return Saved(job.target, num_bytes, 0, seconds, job.forget, problem)


def _write_part(
    job: Job, content: Content, started: Callable[[], None] | None
) -> tuple[Manifest, Mapping[str, str]]:
    """Write this rank's files to its own folder. Their manifest, and which of them are equal to
    one of an earlier checkpoint: its place in the run."""
    files.make_folder(job.root)
    if files.exists(job.target):  # of a save of this step that has failed
        delete(job.target)
    with temporary_folder(job.target) as part:
        if started is not None:
            started()
        written = write_files(job, content, part.folder)
        manifest = manifest_of(job, written)
        part.commit(job.target, dump(manifest))
    return manifest, {name: f"{job.parent}/{there}" for name, there in written.linked.items()}


@contextlib.contextmanager
def _alive(root: Path) -> Iterator[None]:
    """Show whoever waits for this process that it works: an upload changes no file here. The next
    launch on this machine waits for the lock, as for that of a temporary folder."""
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(_BEAT):
            with contextlib.suppress(OSError):
                (root / ALIVE).touch()

    with files.raising(CheckpointError, f"cannot save to {root}"):
        files.make_folder(root)
        locked = files.open_or_create(root / ALIVE)
    with locked:
        with contextlib.suppress(OSError):  # of another attempt; or there are no locks
            locked.lock()
        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def wait_for_uploads(folder: Path) -> None:
    """Wait on this machine for the uploads of launches before, so that what they save counts.
    ``folder`` is that of the run here. They end by themselves, as nobody trains for them; one that
    was stopped, or hangs, is void once this launch has begun."""
    for path in sorted(inside(folder).glob(f"*/rank_*/{ALIVE}")):
        with announced("a launch before this one, which still uploads (%s)", path.parent):
            _wait_for(path)


def _wait_for(path: Path) -> None:
    watch = StallWatch(lambda: [path])
    while _is_locked(path):
        if watch.seconds() > _PATIENCE:
            message = "%s: an upload does not move: what it has not committed is void"
            logger.warning(message, path.parent)
            return
        time.sleep(_PAUSE)


def _is_locked(path: Path) -> bool:
    try:
        with files.open_file(path, write=True) as file:
            file.lock()
    except BlockingIOError:
        return True
    except OSError:  # it is gone, or there are no locks
        return False
    return False


def commit(stored: StoredSave, reports: Sequence[bytes], where: str, folder: Path) -> Manifest:
    """Commit what all ranks have reported. ``folder`` is for files that are made of theirs."""
    parts = merged(reports, where)
    manifest = with_whole_adapter(parts, stored, folder)
    check_consistent(manifest, where)
    stored.commit(dump(manifest), parts.files.keys() - manifest.files.keys())
    return manifest


def merged(reports: Sequence[bytes], where: str) -> Manifest:
    """The manifest of a checkpoint from those of its ranks. Raises ``CheckpointError`` if they are
    not those of one save."""
    parts = [parse(r, f"{where}: report of rank {i}", is_part=True) for i, r in enumerate(reports)]
    first, *others = parts
    for rank, part in enumerate(others, 1):
        same = ("step", "kind", "layout", "world_size", "mesh", "parent")
        if odd := [name for name in same if getattr(part, name) != getattr(first, name)]:
            raise CheckpointError(f"{where}: ranks 0 and {rank} have reported another {odd[0]}")
        if twice := part.files.keys() & {name for p in parts[:rank] for name in p.files}:
            raise CheckpointError(f"{where}: two ranks have reported {min(twice)[:200]!r}")
    return replace(
        first,
        files={name: size for part in parts for name, size in part.files.items()},
        hashes={name: digest for part in parts for name, digest in part.hashes.items()},
        pieces=[piece for part in parts for piece in part.pieces],
    )


def with_whole_adapter(manifest: Manifest, stored: StoredSave, folder: Path) -> Manifest:
    """``manifest``, if it is an adapter's, with the one file that PEFT opens in place of its boxes,
    which the ranks have stored. The file is made in ``folder``, and uploaded."""
    boxes = manifest.tensors(MODEL) if manifest.is_adapter else {}
    if not boxes:
        return manifest
    described = {name: (pieces.dtype, pieces.shape) for name, pieces in boxes.items()}
    (plan,) = plan_save(ADAPTER.removesuffix(".safetensors"), described, None)
    names = sorted({piece.file for pieces in boxes.values() for piece in pieces})
    path = folder / plan.name
    files.remove_tree(path)  # of an attempt that was killed
    with files.raising(CheckpointError, f"cannot write {path}"), files.create(path) as file:
        file.reserve(plan.header.file_size)
        file.write_at(0, plan.head)
        for name in names:
            data = memoryview(stored.read(name))
            at = 8 + int.from_bytes(data[:8], "little")
            header = parse_header(bytes(data[8:at]), len(data), name)
            for piece in (p for pieces in boxes.values() for p in pieces if p.file == name):
                entry, key = header.entries[piece.key], piece.tensor.removeprefix(_ADAPTER_NAME)
                box = data[entry.offset : entry.offset + entry.num_bytes]
                if files.digest(box) != piece.hash:
                    raise CheckpointError(f"{name}: {piece.key!r} has changed on its way")
                file.write_ranges(ranges_of(plan.header.entries[key], piece.box), box)
        file.sync()
    with open_path(path) as whole:
        hashes = {name: whole.hash(name) for name in boxes}
    stored.send(folder, [plan.name], {})
    files.remove_tree(path)
    kept = {name: size for name, size in manifest.files.items() if name not in names}
    heads = {name: manifest.hashes[name] for name in kept}
    pieces = [
        replace(next(iter(p)), box=Box.whole(p.shape), file=plan.name, key=name, hash=hashes[name])
        for name, p in boxes.items()
    ]
    return replace(
        manifest,
        files={**kept, plan.name: plan.header.file_size},
        hashes={**heads, plan.name: files.digest(plan.head)},
        pieces=[*(p for p in manifest.pieces if p.file not in names), *pieces],
    )
