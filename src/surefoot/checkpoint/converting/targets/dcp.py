"""Weights as PyTorch's distributed checkpoints read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ....parallel.sharding import Mesh
from ....storage import files
from ...disk.commit import new_folder, write_small
from ...disk.file_plan import plan_save
from ...layouts.dcp import file_name
from ...sources.copying import Progress, cast, fill, silent
from ...sources.source import TensorSource
from ..model_files import companions
from ..origin import Done, Origin, WeightsTarget
from ..resharding import ALONE, held_by


def write_dcp(
    source: TensorSource,
    target: Path,
    *,
    mesh: Mesh = ALONE,
    dtype: str | None = None,
    small: Mapping[str, bytes] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write ``source``, sharded for ``mesh``, into the new folder ``target``, with ``small`` files.
    PyTorch's ``HuggingFaceStorageReader`` reads it, ``consolidate_safetensors_files`` unshards it.
    """
    source, plans = cast(source, dtype), []
    with new_folder(target) as folder:
        for rank, held in enumerate(held_by({"model": source}, mesh)):
            own = held["model"]
            tensors = {name: (own[name].dtype, own[name].box.shape) for name in sorted(own)}
            boxes = {name: (one.shape, one.box) for name, one in own.items()}
            plans += plan_save(file_name(rank), tensors, None, boxes=boxes) if tensors else []
        for plan in plans:
            with files.create(folder / plan.name) as file:
                file.reserve(plan.header.file_size)
        for plan in plans:
            with files.open_file(folder / plan.name, follow=False, write=True) as file:
                file.bypass_cache()
                fill(file, source, plan, progress or silent)
        write_small(folder, small or {})


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
