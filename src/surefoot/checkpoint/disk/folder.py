"""A committed checkpoint opened for reading: everything in it is checked before it is used; and the
small files beside a model's weights, which are copied unchanged. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, DamagedFileError
from ...storage import files
from . import strict_json, tensorfile
from .commit import check_step
from .manifest import MANIFEST, STATE, Manifest, Piece, parse

_COMMIT = re.compile(r"[0-9a-f]{40}")
WHAT_TO_DO = "the file is damaged; resume from an earlier checkpoint"


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder and its manifest. Files are checked against the manifest as they are opened."""

    path: Path
    manifest: Manifest
    follow: bool = False  # whether files may be links, as in the hub's cache

    def small(self, name: str) -> bytes:
        """The content of a companion or state file, its length and hash checked."""
        with files.raising(CheckpointError), self._open(name) as file:
            size = file.size
            self._check_size(name, size)
            data = file.read(0, size)
        if files.digest(data) != self.manifest.hashes[name]:
            raise self._damaged(f"{self.path / name}: its hash is not the manifest's; {WHAT_TO_DO}")
        return data

    def tensors(self, name: str) -> tensorfile.TensorFile:
        """A file of tensors, length and header checked; hashes are for the reader of a piece."""
        file = tensorfile.opened(self._open(name))
        try:
            self._check_size(name, file.header.file_size)
            self._check_header(name, file)
        except CheckpointError:
            file.close()
            raise
        return file

    def _open(self, name: str) -> files.File:
        if self.follow:
            return files.open_file(self.path / name)
        return files.open_inside(self.path, name)

    def skeleton(self) -> Mapping[str, Any]:
        """The state without its tensors; a ``CheckpointError`` if there are only weights."""
        if STATE not in self.manifest.files:
            setting = "adapter" if self.manifest.is_adapter else "path"
            raise CheckpointError(
                f"{self.path}: a weights-only checkpoint; it has no training state ({STATE}) "
                "and cannot be resumed. To start from its weights, remove checkpoint.resume "
                f"and set model.{setting}={self.path}"
            )
        return strict_json.parse_object(self.small(STATE), str(self.path / STATE))

    def check_stored(self, file: tensorfile.TensorFile, piece: Piece) -> None:
        """Read a piece, and reject it if the hash of its bytes differs from the manifest's."""
        inside = piece.inside(file.entry(piece.key).shape)
        self.check_piece(piece, file.hash(piece.key, inside))

    def check_piece(self, piece: Piece, digest: str) -> None:
        """Reject a piece if the hash of its bytes differs from the manifest's."""
        if piece.hash != digest:
            raise self._damaged(
                f"{self.path / piece.file}: {piece.key!r} has changed since it was saved (hash "
                f"{digest[:8]}…, expected {piece.hash[:8]}…); {WHAT_TO_DO}"
            )

    def _check_size(self, name: str, size: int) -> None:
        expected = self.manifest.files.get(name)
        if size != expected:
            raise self._damaged(
                f"{self.path / name}: {size} bytes, expected {expected}; {WHAT_TO_DO}"
            )

    def _damaged(self, message: str) -> DamagedFileError:
        return DamagedFileError(self.path, message)

    def _check_header(self, name: str, file: tensorfile.TensorFile) -> None:
        where = self.path / name
        if file.head_hash != self.manifest.hashes[name]:
            raise self._damaged(f"{where}: its header is not the one that was saved; {WHAT_TO_DO}")
        pieces = self.manifest.pieces_in(name)
        if odd := sorted(pieces.keys() ^ file.header.entries.keys()):
            raise CheckpointError(
                f"{where}: file and manifest disagree about tensor {odd[0][:200]!r}"
            )
        for key, parts in pieces.items():
            entry, first = file.header.entries[key], parts[0]
            expected = first.box.shape if len(parts) == 1 else first.shape
            if (entry.dtype, entry.shape) != (first.dtype, expected):
                raise CheckpointError(
                    f"{where}: {key!r} is {entry.dtype} {list(entry.shape)}, expected "
                    f"{first.dtype} {list(expected)} as in the manifest"
                )
            if any(piece.tensor != first.tensor for piece in parts):
                raise CheckpointError(
                    f"{where}: {key!r} cannot be both {first.tensor!r} and {parts[-1].tensor!r}"
                )


def is_download(folder: Path) -> bool:
    """Whether ``folder`` is in the cache of a hub: its files are links, and some may be missing."""
    return any(
        parent.name == "snapshots" and _COMMIT.fullmatch(child.name)
        for child, parent in pairwise((folder, *folder.parents))
    )


def open_checkpoint(folder: Path, *, follow: bool = False) -> CheckpointFolder:
    """Open ``folder`` by its manifest; a ``CheckpointError`` if it is not a complete checkpoint.
    With ``follow``, and in the cache of a hub, its files may be links."""
    where, follow = folder / MANIFEST, follow or is_download(folder)
    with files.raising(CheckpointError):
        if not files.exists(where):
            why = f"was never committed: it has no {MANIFEST}"
            why = why if files.exists(folder) else "does not exist"
            raise CheckpointError(f"{folder}: this checkpoint {why}")
        opened = files.open_file(where) if follow else files.open_inside(folder, MANIFEST)
        with opened as file:
            data = files.read_all(file, strict_json.MAX_BYTES)
    manifest = parse(data, str(where))
    check_step(folder, str(folder), manifest.step)
    return CheckpointFolder(folder, manifest, follow)


# What lies beside the weights: the tokenizer, its template, processors, and code a model brings.
TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "*.jinja", "chat_template.json", "additional_chat_templates/*"),
)
MODEL = ("*.py", "preprocessor_config.json", "processor_config.json", "LICENSE*")


def companions_of(model: Path, tokenizer: Path) -> dict[str, bytes]:
    """The companion files of two folders."""
    return {**_matching(model, MODEL), **tokenizer_of(tokenizer)}


def tokenizer_of(folder: Path) -> dict[str, bytes]:
    """The files of the tokenizer in ``folder``; none if it is no folder."""
    return {} if folder == Path() else _matching(folder, TOKENIZER)  # "": it was not loaded


def _matching(folder: Path, patterns: Sequence[str]) -> dict[str, bytes]:
    paths = (path for pattern in patterns for path in sorted(folder.glob(pattern)))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.is_file()}
