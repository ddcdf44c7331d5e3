"""Is this checkpoint what was saved? Every byte is covered: by a hash or by the manifest's seal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .. import files
from ..errors import CheckpointError
from .commit import named
from .folder import CheckpointFolder, open_checkpoint
from .index import MANIFEST, is_safetensors


@dataclass(frozen=True)
class Report:
    """What ``verify`` found. ``notes`` are worth knowing, but do not make a checkpoint bad."""

    folder: Path
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_bytes: int = 0  # that were read and hashed

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.problems


@dataclass(frozen=True)
class Found:
    """The checkpoint to go on from, if any, and the newer ones that are not whole, with why."""

    path: Path | None
    passed_over: list[tuple[Path, str]]


def verify(folder: Path, *, full: bool) -> Report:
    """Check a checkpoint of ours: lengths, headers and small files; with ``full`` every byte."""
    report = Report(folder)
    try:
        checkpoint = open_checkpoint(folder)
    except CheckpointError as error:
        report.problems.append(str(error))
        return report
    for name in sorted(checkpoint.manifest.files):
        report.problems.extend(_problems(checkpoint, name, full=full))
    report.notes.extend(_strays(checkpoint))
    return report


def find(root: Path) -> Found:
    """The newest checkpoint under ``root`` that verifies to the last byte."""
    passed_over: list[tuple[Path, str]] = []
    for folder in reversed(named(root)):
        report = verify(folder, full=True)
        if report.ok:
            return Found(folder, passed_over)
        passed_over.append((folder, report.problems[0]))
    return Found(None, passed_over)


def _problems(checkpoint: CheckpointFolder, name: str, *, full: bool) -> Iterator[str]:
    try:
        if not is_safetensors(name):
            checkpoint.small(name)
            return
        with files.raising(CheckpointError), checkpoint.tensors(name) as file:
            for key, piece in checkpoint.manifest.pieces_in(name).items() if full else ():
                try:
                    checkpoint.check_piece(piece, file.hash(key))
                except CheckpointError as error:
                    yield str(error)
    except CheckpointError as error:
        yield str(error)


def _strays(checkpoint: CheckpointFolder) -> Iterator[str]:
    known = {MANIFEST} | {name.split("/")[0] for name in checkpoint.manifest.files}
    for name in files.list_folder(checkpoint.path):
        if name not in known:
            yield f"{checkpoint.path / name}: was not saved with this checkpoint"
