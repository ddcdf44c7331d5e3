"""A weights-only Surefoot checkpoint, written from any tensor source.

Every command and every reader accepts it, and a run may start from it (``model.path``). It cannot
be resumed, because it has no training state. Its step is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...geometry.mesh import Mesh
from ..disk.commit import refuse_existing
from ..disk.manifest import Kind, Layout, Manifest
from ..saving.job import Saved
from ..saving.preparation import indexes
from ..sources.copying import Progress, cast
from ..sources.source import TensorSource
from .resharding import ALONE, SHARD_SIZE, Resharding, commit, shards_of


def write_weights(
    source: TensorSource,
    target: Path | str,
    *,
    kind: Kind = "full",
    layout: Layout = "full",
    mesh: Mesh = ALONE,
    dtype: str | None = None,
    small: Mapping[str, bytes] | None = None,
    progress: Progress | None = None,
) -> Saved:
    """Write ``source``, under Hugging Face's names (of ``kind`` adapter: PEFT's), as a Surefoot
    checkpoint ``target``, atomically, with ``small`` files. The other options are ``reshard``'s."""
    path = Path(target).absolute()
    refuse_existing(path)
    sources = {"model": cast(source, dtype)}
    shards = list(shards_of(sources, kind, layout, mesh, SHARD_SIZE))
    manifest = Manifest(step=0, kind=kind, created="", versions={}, files={}, hashes={}, pieces=())
    files = {**(small or {}), **indexes(shards, mesh.size)}
    return commit(Resharding(path, manifest, layout, mesh, sources, shards, files), path, progress)
