"""Map tensors of weight files to slices of parameters that transformers fuses at loading.

Experts, for example, are separate in files and one tensor with three dimensions in memory, with
gate before up. If the model is sharded, a rank has a box of the fused tensor, and so a box of some
of its slices. No slice is gathered to be saved or loaded.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ..errors import ModelError
from ..parallel.sharding import Cuts, local_offset_and_shape


@dataclass(frozen=True)
class FusedPlacement:
    """The position in memory of a matrix in the files."""

    fused: str  # parameter
    whole: tuple[int, int, int]  # shape of that: experts, rows, columns
    start: tuple[int, int, int]
    shape: tuple[int, int]


def places(model: PreTrainedModel) -> dict[str, FusedPlacement]:
    """The position of each matrix in the files that has no parameter of its own.

    Found by letting transformers split tensors that contain the numbers of their rows. Raises
    ``ModelError`` if the result is not that many rows in their order.
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
                f"{name}: transformers does more than split {fused} into rows; this model "
                "cannot be sharded"
            )
        start = (first // height, first % height, 0)
        found[name] = FusedPlacement(fused, (experts, height, width), start, (count, width))
    return found


def names_unless_split(model: PreTrainedModel, fused: Collection[str]) -> dict[str, str]:
    """The names in the files of parameters that are there as they are in memory. Raises
    ``ModelError`` if one is transposed."""
    found = {}
    for name in fused:
        with torch.device("meta"):
            parameter = torch.empty(model.get_parameter(name).shape)
        parts = revert_weight_conversion(model, {name: parameter})
        for in_files, tensor in parts.items() if len(parts) == 1 else ():
            if tensor.shape != parameter.shape or not tensor.is_contiguous():
                raise ModelError(f"{in_files}: transformers transposes it when it is loaded")
            found[name] = in_files
    return found


def _owners(model: PreTrainedModel, shapes: dict[str, torch.Size]) -> dict[str, str]:
    """The parameter of each tensor in the files."""
    with torch.device("meta"):
        return {
            name: fused
            for fused, shape in shapes.items()
            for name in revert_weight_conversion(model, {fused: torch.empty(shape)})
        }


def view(fused: torch.Tensor, at: FusedPlacement, cuts: Cuts | None) -> torch.Tensor:
    """This rank's part of a slice of ``fused``, sharing its memory.

    As a tensor it seems to be complete on every rank, which is not so: only ``cuts`` has its
    sharding.
    """
    if not isinstance(fused, DTensor):
        raise ModelError(f"{at.fused}: not sharded, but other parameters are")
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
