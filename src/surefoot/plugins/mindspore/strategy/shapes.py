"""Infer the slices of ranks without strategy files, from the full shapes of the tensors.

The ratio of a file's dimension to the full one gives the number of shards. The axis that shards it,
and so the part of each rank, follows if only one layout of this kind of tensor gives these shapes.
If several do and the values do not distinguish them, the folder is rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ....checkpoint.disk.tensorfile import TensorFile
from ....checkpoint.layouts.dcp import DcpChunk
from ....errors import CheckpointError, counted
from ....parallel.box import Box
from ..reading.consistency import Slice, check_fit
from .parallel_config import ParallelConfig, weight_of
from .slicing import TensorLayout
from .strategy_files import Strategy

Shapes = Mapping[str, tuple[int, ...]]  # of whole weights, by MindSpore's names

_ASK = "name the strategy files with --strategy FOLDER"


def infer_strategy(opened: Sequence[TensorFile], shapes: Shapes | None, where: Path) -> Strategy:
    """The one strategy that fits the files; a ``CheckpointError`` if there is none, or several."""
    if shapes is None:
        raise CheckpointError(
            f"{where}: {len(opened)} ranks without strategy files, so the part of each rank is "
            f"unknown; {_ASK}, or name the same model, unsharded, with --base MODEL"
        )
    num_stages = _num_stages(opened, shapes, where)
    size = len(opened) // num_stages
    fitting = [
        found
        for mp in range(1, size + 1)
        if size % mp == 0
        and (found := _strategy(opened, shapes, num_stages, mp, where)) is not None
    ]
    devices = counted(size, "device")
    if not fitting:
        raise CheckpointError(f"{where}: no layout on {devices} gives these shapes; {_ASK}")
    if len({_boxes_by_strategy(found, opened, shapes) for found in fitting}) > 1:
        raise CheckpointError(f"{where}: the shapes fit more than one layout on {devices}; {_ASK}")
    return fitting[0]


def _num_stages(opened: Sequence[TensorFile], shapes: Shapes, where: Path) -> int:
    """The number of blocks of ranks that have no weights in common."""
    names = [{name for name in file.header.entries if weight_of(name) in shapes} for file in opened]
    for count in range(len(opened), 0, -1):
        size = len(opened) // count
        if len(opened) % count:
            continue
        blocks = [set().union(*names[i * size : (i + 1) * size]) for i in range(count)]
        if sum(map(len, blocks)) == len(set().union(*blocks)) and all(blocks):
            return count
    raise CheckpointError(f"{where}: no rank has a weight of the model; is it another model?")


def _strategy(
    opened: Sequence[TensorFile], shapes: Shapes, num_stages: int, mp: int, where: Path
) -> Strategy | None:
    """The strategy with ``mp`` devices per model, if there is one; rejected if it is ambiguous."""
    size = len(opened) // num_stages
    stages: list[dict[str, list[TensorLayout]]] = []
    for stage in range(num_stages):
        files = opened[stage * size : (stage + 1) * size]
        names = sorted({name for file in files for name in file.header.entries})
        known = {name: shapes[weight_of(name)] for name in names if weight_of(name) in shapes}
        found = {n: list(_fitting(n, whole, files, size, mp)) for n, whole in known.items()}
        if not all(found.values()):
            return None
        stages.append(found)
    for found in stages:
        for name, ways in found.items():
            whole = shapes[weight_of(name)]
            if len({_boxes(layout, whole, size) for layout in ways}) > 1:
                raise CheckpointError(
                    f"{where}: {name[:200]!r} of shape {list(whole)} can be sharded over {size} "
                    f"devices in several ways that give these files; {_ASK}"
                )
    return Strategy([{name: ways[0] for name, ways in own.items()} for own in stages], where)


def _fitting(
    name: str, whole: tuple[int, ...], files: Sequence[TensorFile], size: int, mp: int
) -> Iterator[TensorLayout]:
    """The layouts that give the shapes, and are consistent with the values, of these files."""
    held = [(rank, file) for rank, file in enumerate(files) if name in file.header.entries]
    local = {file.entry(name).shape for _, file in held}
    for layout in _candidates(weight_of(name), whole, size, mp):
        try:
            boxes = _boxes(layout, whole, size)
        except CheckpointError:
            continue
        if local == {boxes[0].shape} and _agrees(name, layout, whole, held):
            yield layout


def _candidates(weight: str, whole: tuple[int, ...], size: int, mp: int) -> Iterator[TensorLayout]:
    """The ways MindSpore Transformers may lay out a tensor of this name."""
    told = {weight: ("F32", whole)}
    for vocab_emb_dp in (True, False):
        config = ParallelConfig(size // mp, mp, vocab_emb_dp=vocab_emb_dp)
        try:
            (plain,) = (stage[weight] for stage in config.stages(told))
        except CheckpointError:
            continue
        yield plain
        for shards in range(2, size + 1):
            if size % shards == 0:
                yield replace(plain, num_shards=shards)


def _agrees(
    name: str, layout: TensorLayout, whole: tuple[int, ...], held: Sequence[tuple[int, TensorFile]]
) -> bool:
    slices = [Slice(rank, DcpChunk(file, whole, layout.box(whole, rank))) for rank, file in held]
    try:
        check_fit({name: slices}, Path())
    except CheckpointError:
        return False
    return True


def _boxes(layout: TensorLayout, whole: tuple[int, ...], size: int) -> tuple[Box, ...]:
    return tuple(layout.box(whole, device) for device in range(size))


def _boxes_by_strategy(
    found: Strategy, opened: Sequence[TensorFile], shapes: Shapes
) -> tuple[object, ...]:
    size = len(opened) // len(found.stages)
    return tuple(
        (name, _boxes(own[name], shapes[weight_of(name)], size))
        for own in found.stages
        for name in sorted(own)
    )
