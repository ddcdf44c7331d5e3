"""Verify a checkpoint: every byte is covered by a hash or by the manifest's seal.

transformers and PEFT read weights themselves, through a memory map. Meanwhile threads read the same
pages, and compare the hash of every tensor with the manifest's (``ConcurrentCheck``).

``recover_latest`` finds the latest valid checkpoint, after orphaned writers have ended and
leftovers are deleted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CheckpointError, DamagedFileError
from ..storage import files
from ..storage.cgroups import usable_cores
from ..storage.folder_lock import StallWatch, process_with, state_of
from .disk import strict_json
from .disk.commit import being_written, clean, mark_damaged, named, step_of
from .disk.folder import CheckpointFolder, is_download, open_checkpoint
from .disk.manifest import MANIFEST, STATE, Piece, is_safetensors
from .disk.tensorfile import TensorFile
from .layouts.detection import detect_layout, has_manifest, is_foreign, open_weights
from .layouts.layout import AS_STORED, Reading
from .state.roles import FileRole, role_of

PLAIN_JSON = ("config.json", "adapter_config.json", "generation_config.json")


@dataclass(frozen=True)
class Report:
    """The result of ``verify``. ``notes`` are worth knowing, but are not errors."""

    folder: Path
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checked: str = ""  # how thoroughly, in words

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


@dataclass(frozen=True)
class Found:
    """The checkpoint to resume from, if any, and the later invalid ones, with reasons."""

    path: Path | None
    passed_over: list[tuple[Path, str]]


Progress = Callable[[int], None]  # is told the bytes of every tensor once it is hashed


def verify(
    folder: Path | str,
    *,
    full: bool = True,
    progress: Progress | None = None,
    reading: Reading = AS_STORED,
) -> Report:
    """Check a folder of weights; with ``full`` every byte that has a hash.

    In a Surefoot checkpoint every byte has one. In a foreign folder, headers, index and
    configuration are checked for completeness and consistency. Raises ``CheckpointError`` only if
    there is nothing to check.
    """
    folder = Path(folder)
    with files.raising(CheckpointError):
        layout = detect_layout(folder)
    if layout is None and step_of(folder) < 0:
        open_weights(folder)  # says what there is instead
    if layout is not None and not layout.has_manifest:
        return _verify_plain(folder, reading)
    return verify_checkpoint(folder, full=full, progress=progress)


def verify_checkpoint(folder: Path, *, full: bool, progress: Progress | None = None) -> Report:
    """Check a Surefoot checkpoint: lengths, headers and small files; with ``full`` every byte. What
    was not downloaded from a hub is no problem, unless ``full``."""
    try:
        checkpoint = open_checkpoint(folder)
        notes = _strays(checkpoint)
        may_lack = not full and is_download(folder)
        problems = [
            problem
            for name in sorted(checkpoint.manifest.files)
            if not may_lack or files.exists(folder / name)
            for problem in problems_in(checkpoint, name, full=full, progress=progress)
        ]
        checked = "every byte checked" if full else "lengths, headers and small files checked"
        return Report(folder, problems, notes, checked)
    except CheckpointError as error:
        return Report(folder, [str(error)])


def verify_weights(folder: Path) -> Report:
    """Check what a reader of the weights in ``folder`` needs: lengths, headers and small files; of
    the adapter in a Surefoot checkpoint, which is small, every byte of its weights as well."""
    report = verify(folder, full=False)
    if not report.ok or not has_manifest(folder):
        return report
    checkpoint = open_checkpoint(folder)
    names = [
        name
        for name in checkpoint.manifest.files
        if checkpoint.manifest.is_adapter and _has_weights(checkpoint.manifest.pieces_of(name))
    ]
    report.problems.extend(problem for name in names for problem in problems_in(checkpoint, name))
    return report


def expect_valid(folder: Path) -> None:
    """Raise ``CheckpointError`` unless every byte of a Surefoot checkpoint verifies."""
    report = verify_checkpoint(folder, full=True)
    if not report.ok:
        raise CheckpointError(report.problems[0])


def _verify_plain(folder: Path, reading: Reading) -> Report:
    problems = []
    try:
        open_weights(folder, reading)
        for name in PLAIN_JSON:
            if files.exists(folder / name):
                with files.raising(CheckpointError):
                    strict_json.read_object(folder / name)
    except CheckpointError as error:
        problems.append(str(error))
    note = f"{folder}: not a Surefoot checkpoint, so it has no hashes for its values"
    return Report(folder, problems, [note], "structure checked")


def find_latest(root: Path | str) -> Found:
    """The latest checkpoint under ``root`` whose every byte verifies."""
    passed_over: list[tuple[Path, str]] = []
    for folder in reversed(named(Path(root))):
        report = verify_checkpoint(folder, full=True)
        if report.ok:
            return Found(folder, passed_over)
        passed_over.append((folder, report.problems[0]))
    return Found(None, passed_over)


def problems_in(
    checkpoint: CheckpointFolder, name: str, *, full: bool = True, progress: Progress | None = None
) -> Iterator[str]:
    """The problems of one file of an opened checkpoint; with ``full`` of every byte of it."""
    try:
        if not is_safetensors(name):
            checkpoint.small(name)
            if (rank := checkpoint.manifest.hash_lists.get(name)) is not None:
                checkpoint.manifest.written_by(rank)
            return
        with files.raising(CheckpointError), checkpoint.tensors(name) as file:
            for piece in checkpoint.manifest.pieces_of(name) if full else ():
                try:
                    checkpoint.check_stored(file, piece)
                except CheckpointError as error:
                    yield str(error)
                if progress is not None:
                    progress(piece.num_bytes)
    except CheckpointError as error:
        yield str(error)


def _strays(checkpoint: CheckpointFolder) -> list[str]:
    """Files that are not in the manifest: notes of a user, or files for other programs."""
    saved_names = {MANIFEST} | {name.split("/")[0] for name in checkpoint.manifest.files}
    with files.raising(CheckpointError):
        strays = [name for name in files.list_folder(checkpoint.path) if name not in saved_names]
    return [f"{checkpoint.path / name}: was not saved with this checkpoint" for name in strays]


_HASHERS = min(4, usable_cores())
_Part = tuple[CheckpointFolder, TensorFile, Piece]


class ConcurrentCheck:
    """The check of all networks' weights in ``folders``, and of the small files beside them and in
    ``others``. A folder without a manifest has no hashes.

    Small files and headers are checked before this returns. Values are hashed in threads until
    ``wait``; if several ranks read together, each hashes its share. The end of the block abandons
    the rest. Raises ``DamagedFileError``, or ``CheckpointError`` without a valid manifest.
    """

    def __init__(
        self,
        folders: Collection[Path],
        others: Collection[Path] = (),
        *,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        with files.raising(CheckpointError), ExitStack() as stack:
            parts = [
                part
                for folder in dict.fromkeys((*others, *folders))
                for part in _parts_to_check(folder, stack, has_weights=folder in folders)
            ]
            self._files = stack.pop_all()
        # The largest first, and every n-th for each of n ranks: shares are about equal.
        parts.sort(key=lambda part: part[2].num_bytes, reverse=True)
        self._pool = ThreadPoolExecutor(_HASHERS)
        self._running = [self._pool.submit(_check, *part) for part in parts[rank::num_ranks]]

    def __enter__(self) -> ConcurrentCheck:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._files.close()

    def wait(self) -> DamagedFileError | None:
        """Wait for the hashes of this rank's share; the error, if one is not the manifest's."""
        for running in self._running:
            try:
                running.result()
            except DamagedFileError as error:
                return error
        return None


def _parts_to_check(folder: Path, stack: ExitStack, *, has_weights: bool) -> Iterator[_Part]:
    """The pieces of all networks in a checkpoint, and their open files; small files are checked
    at once, as far as they exist: a copy from a hub has only what a model needs."""
    if not has_manifest(folder):
        return
    checkpoint = open_checkpoint(folder, follow=True)
    for name in checkpoint.manifest.files:
        is_read = name != STATE and not is_safetensors(name)
        if is_read and files.size_of(folder / name) is not None:
            checkpoint.small(name)
    for name in checkpoint.manifest.files if has_weights else ():
        if _has_weights(pieces := checkpoint.manifest.pieces_of(name)):
            file = stack.enter_context(checkpoint.tensors(name))
            yield from ((checkpoint, file, piece) for piece in pieces)


def _has_weights(pieces: Sequence[Piece]) -> bool:
    """Whether a file contains those of a network."""
    return bool(pieces) and FileRole(role_of(pieces[0].tensor)).is_weights


def _check(checkpoint: CheckpointFolder, file: TensorFile, piece: Piece) -> None:
    with files.raising(CheckpointError):
        checkpoint.check_stored(file, piece)


logger = logging.getLogger(__name__)
_PAUSE = 0.1  # seconds between two looks
_PATIENCE = 300.0  # seconds in which a writer process must write something


MOVE_AWAY = "move all of them to another folder"
_SHOWN = 3  # checkpoints in a message


def recover_latest(root: Path | str, *, from_scratch: str = MOVE_AWAY) -> Path | None:
    """The latest checkpoint under ``root`` whose every byte verifies; None if there are none.

    Call it at the start of a run, while no other one saves to ``root``. It waits for a save that
    outlived a killed run, deletes the leftovers of other saves, and renames a checkpoint that does
    not verify, so that its step can be saved again. All of it is logged. Raises ``CheckpointError``
    if there are checkpoints and none is valid, or if there are only foreign ones; nothing is
    renamed then. ``from_scratch`` says what to do to start from scratch.
    """
    root = Path(root)
    wait_for_orphans(root)
    # After the wait: the save that outlived its run is the newest checkpoint, not a leftover.
    for leftover in clean(root):
        logger.info("removed %s, the temporary folder of an interrupted save", leftover.name)
    latest = find_latest(root)
    if latest.path is None:
        refuse_foreign(latest)
        refuse_damaged(str(root), latest, from_scratch)
    set_aside(latest)
    return latest.path


def refuse_foreign(latest: Found) -> None:
    """Raise ``CheckpointError`` if a checkpoint that was passed over is that of another tool."""
    for path, _ in latest.passed_over:
        if is_foreign(path):
            raise CheckpointError(
                f"{path}: not a Surefoot checkpoint, and saves would reach its step; move it "
                "away or choose another folder"
            )


def refuse_damaged(where: str, latest: Found, from_scratch: str) -> None:
    """Raise ``CheckpointError`` if there are checkpoints, none of which is valid: to train from
    step 0 again is for the user to decide."""
    if latest.passed_over:
        reasons = [f"{path.name}: {reason}" for path, reason in latest.passed_over[:_SHOWN]]
        left = len(latest.passed_over) - len(reasons)
        more = [f"and {left} more, see `surefoot ckpt ls --verify`"] if left else []
        raise CheckpointError(
            f"{where}: it contains no valid checkpoint to resume from ("
            f"{'; '.join([*reasons, *more])}). Restore a file that is named here from a copy; or, "
            f"to start from scratch, {from_scratch}"
        )


def set_aside(latest: Found) -> None:
    """Rename the checkpoints that were passed over, and log why."""
    for path, reason in latest.passed_over:
        aside = mark_damaged(path)
        logger.warning("%s failed verification (%s); renamed to %s", path.name, reason, aside.name)


def wait_for_orphans(root: Path) -> None:
    """Wait for the last snapshot of a killed run, so that the run resumes from it. Raises
    ``CheckpointError`` if its writer process hangs."""
    if not (writing := being_written(root)):
        return
    watch, writer = StallWatch(lambda: writing), _writer_of(writing[0])
    logger.info(
        "the previous launch ended during a save: waiting for its writer process%s to finish %s",
        "" if writer is None else f" (pid {writer})",
        writing[0].name,
    )
    while writing := being_written(root):
        if (stalled := watch.seconds()) > _PATIENCE:
            raise CheckpointError(_stuck(writing[0], stalled))
        time.sleep(_PAUSE)


def _writer_of(part: Path) -> int | None:
    return process_with(part / MANIFEST)


def _stuck(part: Path, seconds: float) -> str:
    """What to do about a writer process that hangs."""
    pid = _writer_of(part)
    if pid is None:
        who = "a process on another machine, or in another container,"
        cure = f"end it, or remove {part}"
    else:
        state = state_of(pid)
        who = f"process {pid}{f', which is {state},' if state else ''}"
        cure = f"let it continue with `kill -CONT {pid}`, or end it with `kill -KILL {pid}`"
    return (
        f"{part}: {who} has been writing this checkpoint since the previous launch, and wrote "
        f"nothing for {seconds:,.0f} s; {cure}. Then start again: the run resumes from the latest "
        "valid checkpoint"
    )
