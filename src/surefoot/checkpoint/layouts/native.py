"""Surefoot checkpoints: everything is in the manifest, and is checked against its hashes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...storage import files
from ..disk.folder import open_checkpoint
from ..disk.manifest import MANIFEST, STATE
from ..sources.weights import FolderWeights, places
from ..state.roles import MODEL, part_of, role_of
from .layout import Layout, Locations


@dataclass(frozen=True)
class Native(Layout):
    """A Surefoot checkpoint."""

    name = "native"
    title = "Surefoot"
    written_by = ""
    has_manifest = True
    has_adapter_config = True
    is_assembled = True
    is_whole_model = True

    def recognise(self, folder: Path) -> bool:
        """Whether it has a manifest or, if it is damaged, the state file."""
        return files.exists(folder / MANIFEST) or files.exists(folder / STATE)

    def open(self, folder: Path) -> FolderWeights:
        """The model, or the adapter."""
        with files.raising(CheckpointError):
            checkpoint = open_checkpoint(folder)
        return FolderWeights(
            self.name, folder, places(checkpoint, checkpoint.manifest.tensors(MODEL))
        )

    def open_all(self, folder: Path, roles: frozenset[str] | None) -> Locations:
        """What the manifest lists; files of other roles are not opened."""
        checkpoint = open_checkpoint(folder)
        found = checkpoint.manifest.by_tensor()
        wanted = {n: p for n, p in found.items() if roles is None or part_of(role_of(n)) in roles}
        return places(checkpoint, wanted)

    def states(self, folder: Path) -> Mapping[str, Any]:
        """All states of the run."""
        checkpoint = open_checkpoint(folder)
        return checkpoint.skeleton() if STATE in checkpoint.manifest.files else {}

    def small_file(self, folder: Path, name: str) -> bytes | None:
        """A file that the manifest lists, checked against its hash."""
        checkpoint = open_checkpoint(folder)
        return checkpoint.small(name) if name in checkpoint.manifest.files else None
