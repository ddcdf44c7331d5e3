"""Check a checkpoint's files against its manifest in threads, while another library reads them.

transformers and PEFT read weights themselves, through a memory map. The threads read the same
pages, and compare the hash of every tensor with the manifest's.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from ...errors import CheckpointError, DamagedFileError
from ...storage import files
from ..disk.folder import CheckpointFolder, open_checkpoint
from ..disk.manifest import STATE, Piece, is_safetensors
from ..disk.tensorfile import TensorFile
from ..layouts.detection import has_manifest
from ..state.roles import FileRole, role_of

_HASHERS = min(4, os.cpu_count() or 1)
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
            for folder in dict.fromkeys((*others, *folders)):
                _check_small_files(folder)
            found = [part for folder in dict.fromkeys(folders) for part in _weights(folder, stack)]
            self._files = stack.pop_all()
        found.sort(key=lambda part: part[2].num_bytes, reverse=True)
        self._pool = ThreadPoolExecutor(_HASHERS)
        self._running = [self._pool.submit(_check, *part) for part in found[rank::num_ranks]]

    def __enter__(self) -> ConcurrentCheck:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._files.close()

    def wait(self) -> DamagedFileError | None:
        """Wait for the hashes of this rank's share; the error, if one is not the manifest's."""
        return next((error for error in map(_error, self._running) if error is not None), None)


def _check_small_files(folder: Path) -> None:
    """Those that exist: a copy from a hub has only what a model needs."""
    if has_manifest(folder):
        checkpoint = open_checkpoint(folder, follow=True)
        for name in checkpoint.manifest.files:
            is_read = name != STATE and not is_safetensors(name)
            if is_read and files.size_of(folder / name) is not None:
                checkpoint.small(name)


def _weights(folder: Path, stack: ExitStack) -> Iterator[_Part]:
    """The pieces of all networks in a checkpoint, and their open files."""
    if has_manifest(folder):
        checkpoint = open_checkpoint(folder, follow=True)
        for name, pieces in checkpoint.manifest.pieces_of_file.items():
            if FileRole(role_of(pieces[0].tensor)).is_weights:
                file = stack.enter_context(checkpoint.tensors(name))
                yield from ((checkpoint, file, piece) for piece in pieces)


def _check(checkpoint: CheckpointFolder, file: TensorFile, piece: Piece) -> None:
    with files.raising(CheckpointError):
        checkpoint.check_stored(file, piece)


def _error(running: Future[None]) -> DamagedFileError | None:
    try:
        running.result()
    except DamagedFileError as error:
        return error
    return None
