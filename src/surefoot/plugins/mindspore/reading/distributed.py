"""Weights of which every rank saved its slice: the file of each box of each tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ....checkpoint.disk import tensorfile
from ....checkpoint.layouts.dcp import DcpChunk
from ....errors import CheckpointError, counted
from ....parallel.box import Box, is_covered_once
from ....storage import files
from ..strategy.shapes import Shapes, infer_strategy
from ..strategy.strategy_files import ENDINGS, Strategy, open_strategy
from .consistency import Slice, check_fit, check_same, check_step
from .full import whole
from .ranks import rank_files, root_of

Boxes = dict[str, list[DcpChunk]]  # by a tensor's name; together they are all of it
_FOLDER = "strategy"  # beside the ranks' folders, or beside the one that holds them
_RANKS = 6  # told of in an error
_INT4 = "Int4"


def open_distributed(
    path: Path, *, strategy: Path | None = None, shapes: Shapes | None = None
) -> Boxes:
    """The slices of every tensor in the files of one step.

    ``path`` is the folder that contains ``rank_0``, one above it, or a file of the step in it.
    ``strategy`` are files that are not beside the ranks. Without any, slices are inferred from the
    full ``shapes``, if these leave one possible layout.
    """
    found = rank_files(path)
    opened = [tensorfile.open_path(file) for file in found]
    for file in opened:
        _refuse_packed(file)
    check_step(opened)
    where = root_of(path)
    if (found_strategy := strategy or find_strategy(where)) is not None:
        told = open_strategy(found_strategy)
    elif len(opened) == 1:
        return {name: [whole(opened[0], name)] for name in opened[0].header.entries}
    else:
        told = infer_strategy(opened, shapes, where)
    if told.world_size != len(opened):
        raise CheckpointError(_wrong_world(told, len(opened), where))
    slices, loose = _sort(opened, told)
    check_fit(slices, told.where)
    boxes = {name: _joined(name, own, where) for name, own in slices.items()}
    for name, own in loose.items():
        first = own[0].stored
        if first.shape:  # a number differs by stage where it counts what a stage does
            check_same(name, [(one.rank, one.stored.file) for one in own])
        boxes[name] = [first]
    return boxes


def find_strategy(root: Path) -> Path | None:
    """The folder of strategy files that belongs to the folder of ranks ``root``."""
    for folder in (root / _FOLDER, root.parent / _FOLDER):
        if files.is_folder(folder) and any(n.endswith(ENDINGS) for n in files.list_folder(folder)):
            return folder
    return None


def _wrong_world(told: Strategy, found: int, where: Path) -> str:
    stages = len(told.stages)
    parts = f"{stages} pipeline stages of " if stages > 1 else ""
    return (
        f"{where}: the files of {counted(found, 'rank')}, but {told.where} is about "
        f"{told.world_size} ({parts}{counted(told.num_devices, 'device')})"
    )


def _sort(
    opened: Sequence[tensorfile.TensorFile], told: Strategy
) -> tuple[dict[str, list[Slice]], dict[str, list[Slice]]]:
    """The tensors of the strategy, by name, and the others, which are replicated."""
    slices: dict[str, list[Slice]] = {}
    loose: dict[str, list[Slice]] = {}
    for rank, file in enumerate(opened):
        layouts, device = told.of_rank(rank)
        for name, entry in file.header.entries.items():
            if name not in layouts:
                loose.setdefault(name, []).append(Slice(rank, whole(file, name)))
                continue
            layout = layouts[name]
            try:
                shape = layout.whole(entry.shape)
                box = layout.box(shape, device)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{told.where}: does not fit {file.path}: {name[:200]!r} of shape "
                    f"{list(entry.shape)}: {error}"
                ) from None
            slices.setdefault(name, []).append(Slice(rank, DcpChunk(file, shape, box)))
    return slices, loose


def _joined(name: str, slices: Sequence[Slice], where: Path) -> list[DcpChunk]:
    """The slices of one tensor, of equal ones the first, after a check that they cover it."""
    first = slices[0].stored
    kinds = {(one.stored.shape, one.stored.file.entry(name).dtype) for one in slices}
    if len(kinds) > 1:
        raise CheckpointError(
            f"{where}: {name[:200]!r} has another type or shape in other ranks' files"
        )
    apart = {one.stored.box: one.stored for one in reversed(slices)}
    boxes = [apart[box] for box in sorted(apart)]
    if not is_covered_once(Box.whole(first.shape), [one.box for one in boxes]):
        ranks = ", ".join(str(one.rank) for one in slices[:_RANKS])
        raise CheckpointError(
            f"{where}: of {name[:200]!r} only slices of rank {ranks} exist, which do not cover "
            f"the shape {list(first.shape)}"
        )
    return boxes


def _refuse_packed(file: tensorfile.TensorFile) -> None:
    metadata: Mapping[str, str] = file.header.metadata
    packed = next((name for name, kind in metadata.items() if kind == _INT4), None)
    if packed is not None:
        raise CheckpointError(
            f"{file.path}: {packed[:200]!r} contains two 4-bit integers in a byte, which is not "
            "supported"
        )
