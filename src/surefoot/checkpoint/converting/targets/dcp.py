"""Weights as PyTorch's distributed checkpoints read them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ....geometry.mesh import Mesh
from ...sources.copying import Progress
from ..dcp_writing import write_dcp
from ..model_files import companions
from ..origin import Done, DtypeName, Family, Hints, Origin


@dataclass(frozen=True)
class DCPFolder:
    """Weights for distributed checkpoints of PyTorch, ``dcp.load``."""

    mesh: Mesh | None = None
    """The processes whose boxes are written: dp_shard=4, dp_shard=4,tp=2, dp_replicate=2 …"""

    dtype: DtypeName | None = None
    """Of the weights; the optimizer's state stays."""

    trust_pickle: bool = False
    """Read the pickles of a checkpoint of DeepSpeed, or of PyTorch's DCP, as inert records."""

    names: Family | None = None
    """What MindSpore Transformers calls the weights, in DST or, with --to huggingface, in SRC;
    keep: as they are."""

    strategy: Path | None = None
    """MindSpore's strategy files of SRC, if not beside its ranks."""

    @property
    def hints(self) -> Hints:
        """What it says of the folder to convert."""
        return Hints(None, self.trust_pickle, self.names, self.strategy)

    def write(self, origin: Origin, target: Path, progress: Progress) -> Done:
        """Boxes for every process of the mesh."""
        source, mesh = origin.weights(), self.mesh or Mesh()
        small = companions(origin.folder, source)
        write_dcp(source, target, mesh=mesh, dtype=self.dtype, small=small, progress=progress)
        reader = f"HuggingFaceStorageReader({str(target)!r})"
        return Done({"mesh": mesh.axes}, f"read it with dcp.load(..., storage_reader={reader})")
