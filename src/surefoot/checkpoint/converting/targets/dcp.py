"""Weights as PyTorch's distributed checkpoints read them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ....geometry.mesh import Mesh
from ...sources.copying import Progress
from ..dcp_writing import write_dcp
from ..model_files import companions
from ..origin import Done, Origin, WeightsTarget


@dataclass(frozen=True)
class DCPFolder(WeightsTarget):
    """Weights for distributed checkpoints of PyTorch, ``dcp.load``."""

    mesh: Mesh | None = None
    """The processes whose boxes are written: dp_shard=4, dp_shard=4,tp=2, dp_replicate=2 …"""

    def write(self, origin: Origin, target: Path, progress: Progress) -> Done:
        """Boxes for every process of the mesh."""
        source, mesh = origin.weights(), self.mesh or Mesh()
        small = companions(origin.folder, source)
        write_dcp(source, target, mesh=mesh, dtype=self.dtype, small=small, progress=progress)
        reader = f"HuggingFaceStorageReader({str(target)!r})"
        return Done({"mesh": mesh.axes}, f"read it with dcp.load(..., storage_reader={reader})")
