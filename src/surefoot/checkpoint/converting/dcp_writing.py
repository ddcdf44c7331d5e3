"""Write any tensor source as a folder of boxes for PyTorch's distributed checkpoints (DCP)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...geometry.mesh import Mesh
from ...storage import files
from ..disk.atomic_folder import new_folder, write_small
from ..disk.file_plan import FilePlan, plan_save
from ..layouts import dcp_boxes as dcp
from ..sources.copying import Progress, cast, fill, silent
from ..sources.source import TensorSource
from .resharding import ALONE, held_by


def plan_dcp(source: TensorSource, mesh: Mesh = ALONE) -> list[FilePlan]:
    """One file for every rank that has boxes."""
    plans = []
    for rank, held in enumerate(held_by({"model": source}, mesh)):
        own = held["model"]
        tensors = {name: (own[name].dtype, own[name].box.shape) for name in sorted(own)}
        boxes = {name: (one.shape, one.box) for name, one in own.items()}
        if tensors:
            plans += plan_save(dcp.file_name(rank), tensors, None, boxes=boxes)
    return plans


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
    source = cast(source, dtype)
    with new_folder(target) as folder:
        for plan in (plans := plan_dcp(source, mesh)):
            with files.create(folder / plan.name) as file:
                file.reserve(plan.header.file_size)
        for plan in plans:
            with files.open_file(folder / plan.name, follow=False, write=True) as file:
                file.bypass_cache()
                fill(file, source, plan, progress or silent)
        write_small(folder, small or {})
