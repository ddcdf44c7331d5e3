"""Where the tensors of the weight files lie in parameters that transformers fuses at load.

Experts, for one, are separate in files and one tensor of three dimensions in memory, in which gates
lie before ups. When the model is spread over processes, a process holds a box of the fused tensor,
and so of each of its parts, if anything: no part is put together to be saved or loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ..errors import ModelError
from ..geometry.sharding import Cuts, local_offset_and_shape


@dataclass(frozen=True)
class FusedPlacement:
    """Of a matrix in the files, where it lies in memory."""

    fused: str  # parameter
    whole: tuple[int, int, int]  # shape of that: experts, rows, columns
    start: tuple[int, int, int]
    shape: tuple[int, int]


def places(model: PreTrainedModel) -> dict[str, FusedPlacement]:
    """For each matrix in the files that has no parameter of its own, where it lies.

    Found by letting transformers take apart tensors that hold the numbers of their rows. Raises
    ``ModelError`` if what comes out is not so many rows in their order.
    """
    shapes = {name: p.shape for name, p in model.named_parameters() if p.ndim == 3}
    rows = {
        name: torch.arange(shape[0] * shape[1]).view(shape[0], shape[1], 1)
        for name, shape in shapes.items()
    }
    known = {numbers.untyped_storage()._cdata: name for name, numbers in rows.items()}
    owners, found = _owners(model, shapes), {}
    for name, numbers in revert_weight_conversion(model, dict(rows)).items():
        if known.get(numbers.untyped_storage()._cdata) and numbers.ndim == 3:
            continue  # only renamed
        fused = owners[name]
        experts, height, width = shapes[fused]
        first, count = int(numbers.flatten()[0]), numbers.numel()
        in_order = torch.arange(first, first + count)
        if numbers.shape != (count, 1) or not torch.equal(numbers.flatten(), in_order):
            raise ModelError(
                f"{name}: transformers does more than cut {fused} into rows; this model cannot be "
                "spread over processes"
            )
        start = (first // height, first % height, 0)
        found[name] = FusedPlacement(fused, (experts, height, width), start, (count, width))
    return found


def _owners(model: PreTrainedModel, shapes: dict[str, torch.Size]) -> dict[str, str]:
    """Which parameter each tensor in the files comes from."""
    with torch.device("meta"):
        return {
            name: fused
            for fused, shape in shapes.items()
            for name in revert_weight_conversion(model, {fused: torch.empty(shape)})
        }


def view(fused: torch.Tensor, at: FusedPlacement, cuts: Cuts | None) -> torch.Tensor:
    """What this process has of a part of ``fused``, sharing its memory.

    It says that it is whole everywhere, which is not so: only ``cuts`` tell.
    """
    if not isinstance(fused, DTensor):
        raise ModelError(f"{at.fused}: not spread over processes, but other parameters are")
    mesh = fused.device_mesh
    names = mesh.mesh_dim_names or ()
    sizes = dict(zip(names, mesh.shape, strict=True))
    place = dict(zip(names, mesh.get_coordinate() or (), strict=True))
    assert cuts is not None
    assert not isinstance(cuts, tuple)
    (expert, row, column), _ = local_offset_and_shape(at.whole, cuts.cuts, sizes, place)
    start, shape = local_offset_and_shape(at.shape, cuts, sizes, place)
    local = fused.to_local()
    if not all(shape):
        mine = local.new_empty(shape)
    else:
        mine = local[at.start[0] - expert]
        mine = mine.narrow(0, at.start[1] + start[0] - row, shape[0])
        mine = mine.narrow(1, at.start[2] + start[1] - column, shape[1])
    return DTensor.from_local(
        mine,
        mesh,
        [Replicate()] * mesh.ndim,
        run_check=False,
        shape=torch.Size(at.shape),
        stride=(at.shape[1], 1),
    )
