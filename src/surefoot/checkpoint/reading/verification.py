"""Verify a checkpoint: every byte is covered by a hash or by the manifest's seal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import CheckpointError
from ...storage import files
from ..disk import strict_json
from ..disk.commit import named, step_of
from ..disk.folder import CheckpointFolder, is_download, open_checkpoint
from ..disk.manifest import MANIFEST, is_safetensors
from ..layouts.detection import detect_layout, has_manifest, open_weights
from ..state.roles import FileRole, role_of

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


def verify(folder: Path | str, *, full: bool = True, progress: Progress | None = None) -> Report:
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
        return _verify_plain(folder)
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
        for name, pieces in checkpoint.manifest.pieces_of_file.items()
        if checkpoint.manifest.is_adapter and FileRole(role_of(pieces[0].tensor)).is_weights
    ]
    report.problems.extend(problem for name in names for problem in problems_in(checkpoint, name))
    return report


def expect_valid(folder: Path) -> None:
    """Raise ``CheckpointError`` unless every byte of a Surefoot checkpoint verifies."""
    report = verify_checkpoint(folder, full=True)
    if not report.ok:
        raise CheckpointError(report.problems[0])


def _verify_plain(folder: Path) -> Report:
    problems = []
    try:
        open_weights(folder)
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
            return
        with files.raising(CheckpointError), checkpoint.tensors(name) as file:
            for piece in checkpoint.manifest.pieces_of_file.get(name, ()) if full else ():
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
    known = {MANIFEST} | {name.split("/")[0] for name in checkpoint.manifest.files}
    with files.raising(CheckpointError):
        strays = [name for name in files.list_folder(checkpoint.path) if name not in known]
    return [f"{checkpoint.path / name}: was not saved with this checkpoint" for name in strays]
