"""What an upload changes in a repository, and whether the repository is this run's at all.

``surefoot.json`` in the repository names the run that was uploaded, and the hash of every file. So
a later upload of the same run knows which files are its own, which are out of date, and which were
edited there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ...checkpoint.disk.commit import step_of
from ...storage.hubs.upload import LocalFile, RemoteEntry

MARKER, CARD = "surefoot.json", "README.md"
FORMAT = "surefoot-upload"
_OF_THE_HUB = ".gitattributes"  # which it creates by itself


@dataclass(frozen=True)
class Marker:
    """What was uploaded last: of which run, and the hashes of its files (sha256 and git's)."""

    source: str
    files: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def dump(self) -> bytes:
        """The file in the repository."""
        listed = {path: list(hashes) for path, hashes in sorted(self.files.items())}
        fields = {"format": FORMAT, "version": 1, "source": self.source, "files": listed}
        return (json.dumps(fields, indent=2) + "\n").encode()


@dataclass(frozen=True)
class Changes:
    """The difference between files here and a repository."""

    added: tuple[LocalFile, ...] = ()  # that the repository lacks, or has in an older form
    same: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()  # uploaded before, and not part of it any more
    kept: tuple[str, ...] = ()  # edited in the repository, and left as they are there
    foreign: tuple[str, ...] = ()  # that somebody else has put there


def parse(data: bytes) -> Marker | None:
    """The marker in a repository; None if it is not one."""
    try:
        found = json.loads(data)
        listed = {str(path): (str(h[0]), str(h[1])) for path, h in found["files"].items()}
        return Marker(str(found["source"]), listed) if found["format"] == FORMAT else None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def compare(
    files: Sequence[LocalFile],
    there: Mapping[str, RemoteEntry],
    marker: Marker | None,
    source: str,
) -> Changes:
    """What to upload, and what stands in the way. ``source`` is the run of ``files``."""
    own = marker.files if marker is not None and source and marker.source == source else {}
    is_own = {p: p in own and entry.is_same(*own[p]) for p, entry in there.items()}
    added, same, kept, foreign = [], [], [], []
    for file in files:
        entry = there.get(file.path)
        if entry is None or (is_own[file.path] and not _same(entry, file)):
            added.append(file)
        elif _same(entry, file):
            same.append(file.path)
        elif file.path == CARD and own:
            kept.append(file.path)
        else:
            foreign.append(file.path)
    here = {file.path for file in files} | {MARKER, _OF_THE_HUB}
    others = [path for path in there if path not in here]
    removed = [path for path in others if is_own[path] and not _in_checkpoint(path)]
    if not own:
        foreign += others
    return Changes(tuple(added), tuple(same), tuple(removed), tuple(kept), tuple(sorted(foreign)))


def marker_of(
    files: Sequence[LocalFile], changes: Changes, before: Marker | None, source: str
) -> Marker:
    """The marker once ``changes`` are made. Checkpoints of earlier uploads stay."""
    known = before.files if before is not None and before.source == source else {}
    stay = {path: hashes for path, hashes in known.items() if path not in changes.removed}
    now = {file.path: (file.sha256, file.git) for file in files if file.path not in changes.kept}
    return Marker(source, {**stay, **now})


def _same(entry: RemoteEntry, file: LocalFile) -> bool:
    if entry.size != file.size:
        return False
    return entry.sha256 == file.sha256 if entry.sha256 else entry.git == file.git


def _in_checkpoint(path: str) -> bool:
    return step_of(Path(PurePosixPath(path).parts[0])) >= 0
