"""Write a tensor source in MindSpore's forms: unsharded, a folder for every rank, or the newer form
of MindSpore Transformers, ``iteration_00000020``.

Called by ``target``, with names that are MindSpore's already. Every slice is read from its file and
written to its place, block by block. So a change of layout needs no merged copy, and no memory that
grows with the model.
"""

from __future__ import annotations

import heapq
import json
import string
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

from ...checkpoint.disk.commit import new_folder, write_small
from ...checkpoint.disk.tensorfile import FilePlan, Hashes, build, num_bytes
from ...checkpoint.sources import (
    Progress,
    TensorSource,
    described,
    fill_boxes,
    read_whole,
    silent,
)
from ...errors import CheckpointError
from ...parallel.sharding import Box
from ...storage import files
from .iteration import COMMON, HYPER, ITERATION, MAP, METADATA, PART, TRACKER
from .opening import META, role_of
from .ranks import INNER
from .strategy import FILE, dump_strategy
from .tensor_layout import ALL_COPIES, Layouts, TensorLayout

PART_SIZE = 3 << 30  # bytes of the largest file, as MindSpore's own merge
STRATEGY = "strategy"
_FORMAT = {"format": "ms"}  # in the header of every file
_COMMON = ("epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size")
_IN_FILES = ("global_step", "learning_rate")  # beside the moments, as tensors
_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
Described = tuple[str, tuple[int, ...]]  # type and shape


def write_full(
    source: TensorSource,
    target: Path,
    *,
    small: Mapping[str, bytes] | None = None,
    part_size: int = PART_SIZE,
    progress: Progress | None = None,
) -> Hashes:
    """Write unsharded tensors into the new folder ``target``, as ``unified_safetensors`` does."""
    tensors, numbers = sorted_out(source)
    boxes, metadata = whole_boxes(tensors), {**_FORMAT, "remove_redundancy": "False"}
    parts = [
        plan_file(PART.format(i), tensors, {name: boxes[name] for name in names}, metadata)
        for i, names in enumerate(_balanced(tensors, part_size))
    ]
    names = {name: part.plan.name for part in parts for name in part.boxes}
    total = sum(num_bytes(dtype, shape) for dtype, shape in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
    if numbers:
        parts.append(plan_file(HYPER, numbers, whole_boxes(numbers), _FORMAT))
    with new_folder(target) as folder:
        hashes = {part.plan.name: write_file(folder, part, source, progress) for part in parts}
        files.write_new(folder / MAP, json.dumps(index, indent=4).encode())
        write_small(folder, small or {})
    return hashes


def _balanced(tensors: Mapping[str, Described], part_size: int) -> list[list[str]]:
    """Names for parts of nearly equal bytes: the largest first, each into the smallest."""
    sizes = {name: num_bytes(*tensors[name]) for name in tensors}
    num_parts = max(1, min(-(-sum(sizes.values()) // part_size), len(sizes)))
    parts: list[list[str]] = [[] for _ in range(num_parts)]
    loads = [(0, i) for i in range(num_parts)]  # a heap
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, i = loads[0]
        heapq.heapreplace(loads, (load + sizes[name], i))
        parts[i].append(name)
    return [sorted(names) for names in parts]


@dataclass(frozen=True)
class Naming:
    """The parts of the ranks' file names: ``llama_rank_0-2_10.safetensors``."""

    prefix: str = "surefoot"
    epoch: int = 1
    step: int = 1  # of the epoch

    def file(self, rank: int) -> str:
        """The file of one rank."""
        return f"{self.prefix}_rank_{rank}-{self.epoch}_{self.step}.safetensors"

    def meta(self, rank: int) -> bytes:
        """The content of ``meta.json`` beside it."""
        content = {
            "last_epoch": self.epoch,
            "last_step": self.step,
            "last_ckpt_file": self.file(rank),
        }
        return json.dumps(content).encode()


def write_distributed(
    source: TensorSource,
    target: Path,
    *,
    stages: Sequence[Layouts],
    naming: Naming = Naming(),
    remove_redundancy: bool = False,
    small: Mapping[str, bytes] | None = None,
    progress: Progress | None = None,
) -> Hashes:
    """Write every rank's slices into ``target/checkpoint/rank_N``, its strategy into
    ``target/strategy``. ``stages`` gives the layout of every tensor by pipeline stage; numbers
    of the training state go into every rank's file."""
    # Box by box from the source. transform_checkpoints of MindSpore 2.10 merges first (2.6 GB for a
    # model of 984 MB, 295 MB here), and where fewer ranks are left it writes wrong values into
    # every weight that is cut by columns (decisions/0032).
    tensors, numbers = sorted_out(source)
    metadata = {**_FORMAT, "remove_redundancy": str(remove_redundancy)}
    boxes_by_rank = rank_boxes(tensors, stages)
    if remove_redundancy:
        boxes_by_rank = without_replicas(tensors, boxes_by_rank)
    with new_folder(target) as folder:
        written: dict[tuple[bytes, tuple[Box, ...]], Path] = {}
        hashes: dict[str, Mapping[str, str]] = {}
        files.new_folder(folder / INNER)
        for rank, boxes in enumerate(boxes_by_rank):
            rank_folder = folder / INNER / f"rank_{rank}"
            files.new_folder(rank_folder)
            with_numbers = {**boxes, **whole_boxes(numbers)}
            file = plan_file(naming.file(rank), {**tensors, **numbers}, with_numbers, metadata)
            path, content = rank_folder / file.plan.name, (file.plan.head, tuple(boxes.values()))
            # Ranks that are replicas have equal files, which need the space of one.
            if content not in written or not files.share(written[content], path):
                of_file = write_file(rank_folder, file, source, progress)
                hashes[str(path.relative_to(folder))] = of_file
                written[content] = path
            files.write_new(rank_folder / META, naming.meta(rank))
            files.sync_folder(rank_folder)
        files.sync_folder(folder / INNER)
        _write_strategies(folder / STRATEGY, stages)
        write_small(folder, small or {})
    return hashes


def _write_strategies(folder: Path, stages: Sequence[Layouts]) -> None:
    files.new_folder(folder)
    ranks = count()
    for stage, layouts in enumerate(stages):
        data = dump_strategy(stage, layouts)
        for _ in range(next(iter(layouts.values())).num_devices):
            files.write_new(folder / FILE.format(next(ranks)), data)
    files.sync_folder(folder)


def write_iteration(
    source: TensorSource,
    target: Path,
    *,
    stages: Sequence[Layouts] | None = None,
    prefix: str = "surefoot",
    remove_redundancy: bool = False,
    small: Mapping[str, bytes] | None = None,
    progress: Progress | None = None,
) -> Hashes:
    """Write ``target/iteration_N``, N the step; ``stages`` as in ``write_distributed``, unset for
    unsharded tensors."""
    tensors, numbers = sorted_out(source)
    boxes_by_rank = [whole_boxes(tensors)] if stages is None else rank_boxes(tensors, stages)
    written_boxes = without_replicas(tensors, boxes_by_rank) if remove_redundancy else boxes_by_rank
    beside_moments = {name: numbers[name] for name in _IN_FILES if name in numbers}
    rank_files = _plan_iteration(tensors, written_boxes, beside_moments, prefix)
    common: dict[str, Any] = {  # null for what the source does not contain
        **{
            n: read_whole(source, n).reshape(-1)[0].item() if n in numbers else None
            for n in _COMMON
        },
        "consumed_samples": None,
        "ckpt_status": None,
    }
    step = common["global_step"] or common["step_num"] or 0
    with new_folder(target) as folder:
        inner = folder / ITERATION.format(step)
        files.new_folder(inner)
        hashes = {
            f"{inner.name}/{file.plan.name}": write_file(inner, file, source, progress)
            for _, file in rank_files
        }
        if stages is not None and len(boxes_by_rank) > 1:
            metadata = _metadata(tensors, stages, boxes_by_rank, rank_files)
            files.write_new(inner / METADATA, json.dumps(metadata, separators=(",", ":")).encode())
        files.write_new(inner / COMMON, json.dumps(common, indent=4).encode())
        files.sync_folder(inner)
        files.write_new(folder / TRACKER, str(step).encode())
        write_small(folder, small or {})
    return hashes


def _plan_iteration(
    tensors: Mapping[str, Described],
    boxes_by_rank: Sequence[Mapping[str, Box]],
    beside_moments: Mapping[str, Described],
    prefix: str,
) -> list[tuple[int, PlannedFile]]:
    """The files of weights and of moments, with their ranks; a rank without tensors has none."""
    rank_files = []
    for part, role, more in (("model", "model", {}), ("opt", "optimizer", beside_moments)):
        boxes_of_role = {}
        for rank, boxes in enumerate(boxes_by_rank):
            of_role = {n: box for n, box in boxes.items() if role_of(n, tensors[n][1]) == role}
            if of_role:
                boxes_of_role[rank] = of_role
        for i, (rank, boxes) in enumerate(boxes_of_role.items()):
            name = f"{prefix}-{part}-{i:07d}-{len(boxes_of_role):07d}.safetensors"
            with_more = {**boxes, **whole_boxes(more)}
            rank_files.append((rank, plan_file(name, {**tensors, **more}, with_more, _FORMAT)))
    return rank_files


def _metadata(
    tensors: Mapping[str, Described],
    stages: Sequence[Layouts],
    boxes_by_rank: Sequence[Mapping[str, Box]],
    rank_files: Sequence[tuple[int, PlannedFile]],
) -> dict[str, object]:
    """The content of ``metadata.json``: an entry for every tensor, and one for every slice."""
    tensor_entries: dict[str, object] = {}
    slice_entries: dict[str, object] = {}
    layouts = {name: layout for stage_layouts in stages for name, layout in stage_layouts.items()}
    locations = defaultdict[tuple[str, Box], list[tuple[str, int]]](list)
    for rank, file in rank_files:
        for name_and_box in file.boxes.items():
            locations[name_and_box].append((file.plan.name, rank))
    for name, (dtype, shape) in tensors.items():
        if dtype not in _TYPES:
            raise CheckpointError(f"{name[:200]!r}: MindSpore has no type {dtype}")
        ranks = [rank for rank, boxes in enumerate(boxes_by_rank) if name in boxes]  # of its stage
        holders = defaultdict[Box, list[int]](list)
        for rank in ranks:
            holders[boxes_by_rank[rank][name]].append(rank)
        counts = layouts[name].counts(len(shape))
        numbered = sorted((_number(box, shape, counts), box) for box in holders)
        tensor_entries[name] = {
            "properties": {
                "dtype": _TYPES[dtype],
                "replica_id": [holders[boxes_by_rank[rank][name]].index(rank) for rank in ranks],
                "allow_shape_mismatch": False,
                "allow_to_save": True,
            },
            "global_shape": list(shape),
            "axis_fragmentations": list(counts),
            "layout": _layout(name, layouts[name], len(shape), ranks),
            "chunk": [
                {"global_offset": [number], "local_shape": list(box.shape)}
                for number, box in numbered
            ],
        }
        for number, box in numbered:
            slice_entries[f"('{name}', ({number},))"] = [
                {"file_name": file_name, "storage_rank": rank, "rank_group": holders[box]}
                for file_name, rank in locations[name, box]
            ]
    return {"state_dict_metadata": tensor_entries, "storage_data": slice_entries}


def _number(box: Box, shape: tuple[int, ...], counts: tuple[int, ...]) -> int:
    """The number of a slice, counted row by row over the parts of all dimensions."""
    number = 0
    for start, length, parts in zip(box.start, shape, counts, strict=True):
        number = number * parts + (start * parts // length if length else 0)
    return number


def _layout(
    name: str, layout: TensorLayout, num_dims: int, ranks: Sequence[int]
) -> dict[str, object]:
    """The layout on ``ranks``, with the optimizer's shards as axes that shard dimension 0."""
    matrix, last = layout.device_matrix, len(layout.device_matrix) - 1
    maps = [[last - axis for axis in dim_axes] for dim_axes in layout.axes(num_dims)]
    if layout.num_shards:
        used = {axis for dim_axes in layout.axes(num_dims) for axis in dim_axes}
        free = [axis for axis in range(len(matrix)) if axis not in used]
        copies = prod(matrix[axis] for axis in free)
        if layout.num_shards not in (ALL_COPIES, copies):
            raise CheckpointError(
                f"{name[:200]!r}: {layout.num_shards} shards over {copies} replicas; this form "
                "only supports shards over all of them"
            )
        maps[0] += [last - axis for axis in free]
    plain = [dim_axes[0] if len(dim_axes) == 1 else dim_axes or -1 for dim_axes in maps]
    return {
        "device_matrix": list(matrix),
        "tensor_map": plain,
        "interleaved_parallel": False,
        "alias_name": list(string.ascii_lowercase[: len(matrix)]),
        "rank_list": list(ranks),
    }


def sorted_out(source: TensorSource) -> tuple[dict[str, Described], dict[str, Described]]:
    """The sharded tensors, and the numbers of the training state, which are replicated."""
    tensors = described(source)
    numbers = {n: tensors[n] for n, (_, shape) in tensors.items() if role_of(n, shape) == "state"}
    return {n: tensor for n, tensor in tensors.items() if n not in numbers}, numbers


def whole_boxes(tensors: Mapping[str, Described]) -> dict[str, Box]:
    """The box of each tensor that contains all of it."""
    return {name: Box.whole(shape) for name, (_, shape) in tensors.items()}


def rank_boxes(tensors: Mapping[str, Described], stages: Sequence[Layouts]) -> list[dict[str, Box]]:
    """The box of every tensor on each rank."""
    names_in_strategy = {name for stage_layouts in stages for name in stage_layouts}
    if missing := sorted(tensors.keys() - names_in_strategy):
        raise CheckpointError(
            f"the strategy does not contain {missing[0][:200]!r}, so no rank has it"
        )
    boxes_by_rank = []
    for stage_layouts in stages:
        layouts = {name: stage_layouts[name] for name in tensors if name in stage_layouts}
        for device in range(next(iter(stage_layouts.values())).num_devices):
            boxes = {
                name: _box(name, layout, tensors[name][1], device)
                for name, layout in layouts.items()
            }
            boxes_by_rank.append(boxes)
    return boxes_by_rank


def _box(name: str, layout: TensorLayout, shape: tuple[int, ...], device: int) -> Box:
    try:
        return layout.box(shape, device)
    except CheckpointError as error:
        raise CheckpointError(f"{name[:200]!r} of shape {list(shape)}: {error}") from None


def without_replicas(
    tensors: Mapping[str, Described], boxes_by_rank: Sequence[Mapping[str, Box]]
) -> list[dict[str, Box]]:
    """Replicated boxes in one rank each: the largest first, into the rank with the least so far."""
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, boxes in enumerate(boxes_by_rank):
        for name, box in boxes.items():
            holders.setdefault((name, box), []).append(rank)
    owned_boxes: list[dict[str, Box]] = [{} for _ in boxes_by_rank]
    loads = [0] * len(boxes_by_rank)
    sizes = {key: num_bytes(tensors[key[0]][0], key[1].shape) for key in holders}
    # Of equal sizes by name, so that the same tensors always lie in the same files.
    for name, box in sorted(holders, key=lambda key: (-sizes[key], key)):
        rank = min(holders[name, box], key=lambda rank: (loads[rank], rank))
        loads[rank] += sizes[name, box]
        owned_boxes[rank][name] = box
    return owned_boxes


@dataclass(frozen=True)
class PlannedFile:
    """A file to write, and the box of each tensor in it."""

    plan: FilePlan
    boxes: Mapping[str, Box]


def plan_file(
    name: str,
    tensors: Mapping[str, Described],
    boxes: Mapping[str, Box],
    metadata: Mapping[str, str],
) -> PlannedFile:
    """The file that contains these boxes of tensors."""
    shapes = {n: (tensors[n][0], box.shape) for n, box in boxes.items()}
    plan = FilePlan(name, *build(shapes, metadata))
    return PlannedFile(plan, {n: boxes[n] for n in plan.header.entries})


def write_file(
    folder: Path, file: PlannedFile, source: TensorSource, progress: Progress | None = None
) -> Mapping[str, str]:
    """Write and flush a file from the source; the hash of each tensor in it."""
    with files.create(folder / file.plan.name) as opened:
        opened.reserve(file.plan.header.file_size)
        opened.bypass_cache()
        return fill_boxes(opened, source, file.plan.head, file.boxes, progress or silent)
