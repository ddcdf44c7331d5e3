"""What a plugin that reaches object stores has to do for runs and checkpoints with URLs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..extensions import Extended

if TYPE_CHECKING:
    from ..parallel.sharding import Box
    from ..storage.remote import Address
    from .apart import Apart, RankPart
    from .disk.folder import CheckpointFolder
    from .disk.manifest import Piece
    from .looking.listing import CheckpointLine
    from .saving.listeners import RunMirror
    from .verification import Report


class StoredSave(Protocol):
    """One save in a store, as one of its ranks sees it. All methods raise ``CheckpointError``."""

    def begin(self) -> None:
        """This rank writes its part, whatever it has reported of this step before."""

    def send(self, folder: Path, names: Collection[str], equal: Mapping[str, str]) -> None:
        """Upload these files of ``folder``; copy those that are ``equal`` to one in the store, by
        their names, from the place in the run that is given."""

    def report(self, part: bytes) -> None:
        """Say that this rank's part, of which this is the manifest, is there."""

    def fail(self, why: str) -> None:
        """Say that it will not be."""

    def reports(self) -> list[bytes]:
        """Wait for the reports of all ranks, in their order. Raises if one of them has failed, or
        has not been heard of for too long."""

    def read(self, name: str) -> bytes:
        """A file of the save."""

    def commit(self, manifest: bytes, leftovers: Collection[str]) -> None:
        """From now on the checkpoint exists, without ``leftovers``. Raises if a later launch has
        taken over the run."""


class RemoteRun(Protocol):
    """The part of a run that is in an object store, as it was found at the launch."""

    address: Address

    @property
    def steps(self) -> Collection[int]:
        """The steps that exist there, as far as is known."""

    def newest_sound(self) -> Path | None:
        """The local folder to resume from, downloaded if need be; None if there is no checkpoint.
        Raises ``CheckpointError`` if there are some, none of which is valid."""

    def local_name(self, name: str) -> str:
        """What the checkpoint in the folder ``name`` there is called here, ``checkpoint-N``."""

    def get(self, name: str) -> Path:
        """One checkpoint and the logs of the run, downloaded unless a local copy exists."""

    def write(self, name: str, data: bytes) -> None:
        """Upload a small file of the run."""

    def mirror(self, start: Path | None) -> RunMirror | None:
        """What uploads while the run trains from ``start`` on. None: another launch of the run has
        begun meanwhile, so that ``start`` has to be found again."""

    def apart(self) -> Apart:
        """Where the ranks of the launch that ``mirror`` has begun save, if they are apart."""

    def give_up(self, step: int) -> None:
        """A checkpoint is damaged, as a rank has found: look for an older one."""


class RemoteStores(Protocol):
    """Object stores, in which runs and checkpoints have URLs: what a plugin that reaches them has
    to do. All raise ``CheckpointError``."""

    def open_run(
        self, address: Address, folder: Path, *, seconds: float, is_apart: bool = False
    ) -> RemoteRun:
        """The run at ``address``, which works in ``folder``, or if it ``is_apart`` in a folder of
        each machine; its recipe is downloaded."""

    def fetch(self, address: Address, cache: Path | None = None, *, seconds: float = 600) -> Path:
        """The local copy of a checkpoint, or of the latest one of a run, which must be valid."""

    def lines(self, address: Address, *, verified: bool) -> list[CheckpointLine]:
        """One line for each checkpoint of a run, oldest first, or the one of a checkpoint."""

    def verify(self, checkpoint: Address, *, full: bool) -> Report:
        """Check what is stored: its lengths, or every byte."""

    def stop(self, address: Address, *, wait: bool) -> Iterator[str]:
        """Request that the latest launch of a run saves and stops, and ``wait`` until it has; what
        is to be shown meanwhile. Raises ``RunError``: no launch is known to train there, or it has
        failed."""

    def save_of(self, apart: Apart, part: RankPart, is_orphan: Callable[[], bool]) -> StoredSave:
        """One rank's part of a save; ``is_orphan`` says whether those that train are dead."""

    def outline(self, apart: Apart, step: int, folder: Path) -> None:
        """Download the manifest and the small files of a checkpoint to ``folder``, apart from the
        hash lists of its ranks."""

    def fetch_file(self, apart: Apart, step: int, folder: Path, name: str) -> None:
        """Download one more of them."""

    def fetch_pieces(
        self, apart: Apart, step: int, folder: CheckpointFolder, parts: Sequence[tuple[Piece, Box]]
    ) -> int:
        """Bring these pieces, or of those whose blocks have hashes what is in the box, and the
        headers of their files to ``folder``, and check their hashes: from the parts that ranks of
        this machine have saved, else from the store. The bytes that came from there. Raises
        ``DamagedFileError`` for what is damaged in it."""


_STORES: Extended[RemoteStores] = Extended("stores", {})


def stores() -> RemoteStores:
    """What opens runs at URLs."""
    return _STORES["fsspec"]
