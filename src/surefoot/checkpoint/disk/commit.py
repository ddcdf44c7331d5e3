"""Atomic commit of a checkpoint: write to a temporary folder, flush it, rename it into place.

The temporary folder, ``.checkpoint-N.<nonce>.part``, contains a manifest from the beginning: empty,
and locked by the writer. The lock ends with the process, however it ends, also across machines and
containers, where process ids say nothing. So a folder whose manifest can be locked has no living
writer, and may be deleted. A foreign folder, such as a conversion writes, has no manifest: its
writer locks the folder itself (``new_folder``).
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError
from ...storage import files
from .manifest import MANIFEST

# One name for a step: no leading zeros, and at most 18 digits, which fit into 64 bits.
_COMMITTED = re.compile(r"checkpoint-(0|[1-9]\d{0,17})")
_PART = re.compile(r"\.checkpoint-\d+\.[0-9a-f]+\.part")
_FORGOTTEN = re.compile(r"\.checkpoint-\d+\.[0-9a-f]+\.forgotten")
_ATTEMPTS = 100
_IN_USE = (errno.EBUSY, errno.ENOTEMPTY)  # of a network disk that keeps deleted files while open


@dataclass(frozen=True)
class PendingCheckpoint:
    """A checkpoint that is being written."""

    folder: Path
    manifest: files.File

    def commit(self, target: Path, manifest: bytes) -> None:
        """Write the manifest, flush, and rename the folder: from then on the checkpoint exists."""
        self.manifest.reserve(len(manifest))
        self.manifest.write_at(0, manifest)
        self.manifest.sync()
        # A file whose folder is not flushed has bytes and no name after a power cut. A test's disk
        # model forgets such names in thousands of ways (tests/crash/power.py).
        for folder in _folders(self.folder):
            files.sync_folder(folder)
        refuse_existing(target)  # a rename would replace an empty folder
        try:
            files.rename(self.folder, target)
        except OSError:
            # A network disk may do it, lose its answer, and then find nothing to do again.
            if not self.manifest.is_at(target / MANIFEST):
                raise
        # The rename is a name in this folder, and not durable before it is flushed.
        files.sync_folder(target.parent)


@contextlib.contextmanager
def temporary_folder(target: Path, nonce: str | None = None) -> Iterator[PendingCheckpoint]:
    """A temporary folder beside ``target``, deleted unless committed; ranks share a ``nonce``. The
    folder around it must exist: a run whose folder was removed must not continue in a new one."""
    manifest = claim(target, lambda folder: files.create(folder / MANIFEST), nonce)
    part = PendingCheckpoint(manifest.path.parent, manifest)
    try:
        with part.manifest:
            yield part
    finally:
        # What stopped the save matters more; `clean` tries again. After a commit nothing is left.
        with contextlib.suppress(OSError):
            files.remove_tree(part.folder)


def refuse_existing(target: Path) -> None:
    """Raise ``CheckpointError`` if the name exists."""
    if files.exists(target):
        raise CheckpointError(
            f"{target}: it exists already, and a checkpoint is never overwritten; "
            f"move it away or choose another folder"
        )


def part_of(target: Path, nonce: str) -> Path:
    """The name of the temporary folder."""
    return target.with_name(f".{target.name}.{nonce}.part")


def new_nonce() -> str:
    """A name that no other save has."""
    return secrets.token_hex(4)


# A lock says that a folder is being written, since it ends with its process. A process number does
# not: in containers every trainer is process 1 on a host of the same name. Nor does age: clocks
# differ, and a save may take an hour (docs/decisions/0011).
def claim(target: Path, hold: Callable[[Path], files.File], nonce: str | None = None) -> files.File:
    """The locked file that ``hold`` opens in a new temporary folder, or the folder itself."""
    for _ in range(_ATTEMPTS):
        folder = part_of(target, nonce or new_nonce())
        files.new_folder(folder)
        with contextlib.suppress(FileNotFoundError):  # cleaned away before it could be opened
            locked = hold(folder)
            if _is_mine(locked):
                return locked
            locked.close()
    raise CheckpointError(f"{target.parent}: another process keeps deleting the temporary folder")


def _is_mine(file: files.File) -> bool:
    try:
        file.lock()  # where there are no locks, nobody cleans either
    except BlockingIOError:
        return False  # the cleaner of another process was faster
    # Locked, but perhaps too late: a cleaner that had the lock before
    # has deleted the folder by now.
    return file.is_at(file.path)


def _folders(folder: Path) -> list[Path]:
    """``folder`` and its subfolders, innermost first."""
    inner = [folder / name for name in files.list_folder(folder)]
    return [*(deep for path in inner if files.is_folder(path) for deep in _folders(path)), folder]


def step_of(folder: Path) -> int:
    """The N of ``checkpoint-N``; -1 for any other name."""
    match = _COMMITTED.fullmatch(folder.name)
    return int(match.group(1)) if match else -1


def check_step(folder: Path, where: str, step: int) -> None:
    """Raise ``CheckpointError`` if ``folder``, shown as ``where``, has the name of another step
    than its manifest: it was renamed, or the manifest is that of another checkpoint."""
    if step_of(folder) not in (-1, step):
        raise CheckpointError(
            f"{where}: its {MANIFEST} is that of step {step}; if the folder was renamed, give it "
            f"the name checkpoint-{step} again"
        )


def named(root: Path) -> list[Path]:
    """The folders under ``root`` with a checkpoint's name, committed or not, oldest step first."""
    with files.raising(CheckpointError):
        paths = [root / name for name in files.names_in(root)]
        return sorted((p for p in paths if step_of(p) >= 0 and files.is_folder(p)), key=step_of)


def committed(root: Path) -> list[Path]:
    """The checkpoints that exist under ``root``, oldest step first. Only the names are checked."""
    with files.raising(CheckpointError):
        return [folder for folder in named(root) if files.exists(folder / MANIFEST)]


def is_leftover(name: str) -> bool:
    """Whether ``name`` is that of a temporary or half deleted folder."""
    return bool(_PART.fullmatch(name) or _FORGOTTEN.fullmatch(name))


def is_being_written(folder: Path) -> bool:
    """Whether a living process is writing a checkpoint in ``folder``."""
    try:
        # Open for writing: NFS gives an exclusive lock to no other descriptor (flock(2)).
        with files.open_file(folder / MANIFEST, follow=False, write=True) as manifest:
            manifest.lock()  # given back at once; a saver that meets it takes another folder
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def being_written(root: Path) -> list[Path]:
    """The folders under ``root`` in which a living process is writing a checkpoint."""
    with files.raising(CheckpointError):
        parts = [root / name for name in files.names_in(root) if _PART.fullmatch(name)]
        return [part for part in parts if is_being_written(part)]


def clean(root: Path) -> list[Path]:
    """Delete the leftovers of killed processes, not of living ones; returns the folders. Those
    with files that another process still reads remain until a later call."""
    removed = []
    with files.raising(CheckpointError, f"cannot clean up in {root}"):
        for name in files.names_in(root):
            # A folder that is being deleted has no owner to ask: two that delete it do no harm.
            remove = _remove if _FORGOTTEN.fullmatch(name) else _remove_if_dead
            try:
                if is_leftover(name) and remove(root / name):
                    removed.append(root / name)
            except OSError as error:
                if error.errno not in _IN_USE:
                    raise
    return removed


def clean_leftovers(target: Path) -> None:
    """Delete the temporary folders of killed processes that were writing ``target``."""
    with files.raising(CheckpointError, f"cannot clean up in {target.parent}"):
        for folder in parts_of(target):
            _remove_if_dead(folder)


def parts_of(target: Path) -> list[Path]:
    """The temporary folders in which ``target`` is written, or was."""
    start, end = part_of(target, "").name.rsplit(".", 1)
    return [
        target.parent / name
        for name in files.names_in(target.parent)
        if name.startswith(start) and name.endswith(f".{end}")
    ]


def _empty(folder: Path) -> None:
    """Delete what is in ``folder``, the manifest last: without it nobody would know the owner."""
    inside = [name for name in files.names_in(folder) if name != MANIFEST]
    for name in (*inside, MANIFEST):
        files.remove_tree(folder / name)


def _remove(folder: Path) -> bool:
    files.remove_tree(folder)
    return True


def _remove_if_dead(folder: Path) -> bool:
    try:
        with files.open_folder(folder) as whole:
            return _remove_unwritten(folder, has_locks=whole.lock())
    except (BlockingIOError, FileNotFoundError):
        return False  # it is being written, or was removed meanwhile


def _remove_unwritten(folder: Path, *, has_locks: bool) -> bool:
    for _ in range(2):
        try:
            with files.open_file(folder / MANIFEST, follow=False, write=True) as manifest:
                if not (manifest.lock() and manifest.is_at(manifest.path)):
                    return False
                _empty(folder)
            return _remove(folder)  # closed before: of an open file, a network disk keeps a name
        except BlockingIOError:
            return False  # it is being written
        except FileNotFoundError:
            # Killed, or still alive, between making the folder and the file: take it only while
            # it is empty. The owner, if there is one, then finds it gone and starts again.
            if files.remove_empty_folder(folder):
                return True
    # Not empty, and no manifest, which is made first: one for others to read, or after a power cut.
    return has_locks and _remove(folder)


def mark_damaged(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that its step can be saved again; returns its new path."""
    target, number = folder.with_name(f"{folder.name}.damaged"), 1
    with files.raising(CheckpointError, f"cannot rename {folder}"):
        while files.exists(target):
            number += 1
            target = folder.with_name(f"{folder.name}.damaged-{number}")
        files.rename(folder, target)
        files.sync_folder(folder.parent)
    return target


def delete(folder: Path) -> None:
    """Delete a checkpoint: rename it atomically, then free its space."""
    # Renamed first: a deletion that is cut short leaves no half checkpoint
    # under the name of a whole one.
    aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.forgotten")
    files.rename(folder, aside)
    files.sync_folder(folder.parent)
    files.remove_tree(aside)


@contextlib.contextmanager
def new_folder(target: Path, *, may_be_empty: bool = False) -> Iterator[Path]:
    """A temporary folder, which becomes ``target`` when the block ends; deleted if it fails.

    Leftovers of killed processes that wrote to ``target`` are deleted first. Raises
    ``CheckpointError`` if ``target`` exists (with ``may_be_empty``: and is not an empty folder), or
    the disk fails.
    """
    failure = f"cannot write {target}"
    with files.raising(CheckpointError, failure):
        # rename() replaces an empty folder, and no other.
        if not (may_be_empty and files.is_folder(target) and not files.list_folder(target)):
            refuse_taken(target)
        files.make_folder(target.parent)
        clean_leftovers(target)
        locked = claim(target, files.open_folder)
        folder = locked.path
        with locked:
            try:
                with files.raising(CheckpointError, failure):  # while the disk is as it was found
                    yield folder
                    files.sync_folder(folder)
                    files.rename(folder, target)
                    files.sync_folder(target.parent)
            except BaseException:
                files.remove_tree(folder)
                raise


def write_small(folder: Path, small: Mapping[str, bytes]) -> None:
    """Companion files, which may be in subfolders."""
    for name, data in small.items():
        files.make_folder((folder / name).parent)
        files.write_new(folder / name, data)


def refuse_taken(target: Path) -> None:
    """Raise ``CheckpointError`` if the name exists."""
    if files.exists(target):
        raise CheckpointError(f"{target}: it exists already; choose another folder")
