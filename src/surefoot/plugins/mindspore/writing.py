"""Convert one of MindSpore's forms to another, and write any tensor source in one of them:
unsharded, a folder for every rank, or the newer form of MindSpore Transformers,
``iteration_00000020``.

Every slice is read from its file and written to its place, block by block. So a change of layout
needs no merged copy, and no memory that grows with the model.
"""

from __future__ import annotations

import heapq
import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, Literal

from ...checkpoint.converting.targets import Done, ModelTarget, Origin, companions
from ...checkpoint.disk.commit import named, new_folder, refuse_taken, write_small
from ...checkpoint.disk.folder import companions_of, open_checkpoint
from ...checkpoint.disk.tensorfile import FilePlan, build, num_bytes
from ...checkpoint.layouts.detection import detect_layout, has_manifest
from ...checkpoint.sources import (
    DtypeName,
    JoinedSource,
    Progress,
    TensorsInMemory,
    TensorSource,
    cast,
    described,
    fill_boxes,
    read_whole,
    silent,
)
from ...errors import CheckpointError
from ...parallel.sharding import Box
from ...storage import files
from .iteration import COMMON, HYPER, ITERATION, MAP, METADATA, PART, TRACKER
from .model import (
    MindSporeHints,
    as_huggingface,
    as_mindspore,
    by_role,
    hints_of,
    moments_of,
    numbers_of,
    open_state,
)
from .naming import KEEP, FamilyName, heads_near
from .opening import LAYOUT, META, form_of, role_of
from .ranks import INNER, model_near, rank_files, step_of
from .strategy import FILE, dump_strategy, open_strategy
from .tensor_layout import ALL_COPIES, Layouts, ParallelConfig, TensorLayout

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
_ITERATION_FORMAT = {"format": "ms"}


def write_iteration(
    source: TensorSource,
    target: Path,
    *,
    stages: Sequence[Layouts] | None = None,
    prefix: str = "surefoot",
    remove_redundancy: bool = False,
    small: Mapping[str, bytes] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write ``target/iteration_N``, N the step; ``stages`` as in ``write_distributed``."""
    tensors, numbers = sorted_out(source)
    full_boxes = {name: Box.whole(shape) for name, (_, shape) in tensors.items()}
    boxes_by_rank = [full_boxes] if stages is None else rank_boxes(tensors, stages)
    written_boxes = without_replicas(tensors, boxes_by_rank) if remove_redundancy else boxes_by_rank
    common = _common(source, numbers)
    number = common["global_step"] or common["step_num"] or 0
    beside = {name: numbers[name] for name in _IN_FILES if name in numbers}
    planned = _planned(tensors, written_boxes, beside, prefix)
    with new_folder(target) as folder:
        inner = folder / ITERATION.format(number)
        files.new_folder(inner)
        for _, file in planned:
            write_file(inner, file, source, progress)
        if stages is not None and len(boxes_by_rank) > 1:
            places: dict[tuple[str, Box], list[tuple[str, int]]] = {}
            for rank, file in planned:
                for key in file.boxes.items():
                    places.setdefault(key, []).append((file.plan.name, rank))
            metadata = _metadata(tensors, stages, boxes_by_rank, places)
            files.write_new(inner / METADATA, json.dumps(metadata, separators=(",", ":")).encode())
        files.write_new(inner / COMMON, json.dumps(common, indent=4).encode())
        files.sync_folder(inner)
        files.write_new(folder / TRACKER, str(number).encode())
        write_small(folder, small or {})


def _planned(
    tensors: Mapping[str, Described],
    boxes_by_rank: Sequence[Mapping[str, Box]],
    beside: Mapping[str, Described],
    prefix: str,
) -> list[tuple[int, PlannedFile]]:
    """The files of weights and of moments, with their ranks; a rank without tensors has none."""
    planned = []
    for part, role in (("model", "model"), ("opt", "optimizer")):
        role_boxes = {
            rank: {n: box for n, box in boxes.items() if role_of(n, tensors[n][1]) == role}
            for rank, boxes in enumerate(boxes_by_rank)
        }
        role_boxes = {rank: boxes for rank, boxes in role_boxes.items() if boxes}
        for i, (rank, boxes) in enumerate(role_boxes.items()):
            name = f"{prefix}-{part}-{i:07d}-{len(role_boxes):07d}.safetensors"
            more = beside if role == "optimizer" else {}
            every = {**boxes, **{n: Box.whole(shape) for n, (_, shape) in more.items()}}
            file = file_of(name, {**tensors, **more}, list(every), every, _ITERATION_FORMAT)
            planned.append((rank, file))
    return planned


Places = Mapping[tuple[str, Box], Sequence[tuple[str, int]]]  # files and ranks of every slice


def _common(source: TensorSource, numbers: Mapping[str, Described]) -> dict[str, Any]:
    """The content of ``common.json``; null for what the source does not contain."""
    common = {
        name: read_whole(source, name).reshape(-1)[0].item() if name in numbers else None
        for name in _COMMON
    }
    return {**common, "consumed_samples": None, "ckpt_status": None}


def _metadata(
    tensors: Mapping[str, Described],
    stages: Sequence[Layouts],
    boxes_by_rank: Sequence[Mapping[str, Box]],
    places: Places,
) -> dict[str, object]:
    """The entries of ``metadata.json`` for every tensor, and for the file of every slice."""
    described: dict[str, object] = {}
    storage: dict[str, object] = {}
    layouts = {name: layout for stage_layouts in stages for name, layout in stage_layouts.items()}
    for name, (dtype, shape) in tensors.items():
        counts = layouts[name].counts(len(shape))
        holders: dict[Box, list[int]] = {}
        ranks = [rank for rank, boxes in enumerate(boxes_by_rank) if name in boxes]  # of its stage
        for rank in ranks:
            holders.setdefault(boxes_by_rank[rank][name], []).append(rank)
        numbered = sorted((_number(box, shape, counts), box) for box in holders)
        replicas = [holders[boxes_by_rank[rank][name]].index(rank) for rank in ranks]
        if dtype not in _TYPES:
            raise CheckpointError(f"{name[:200]!r}: MindSpore has no type {dtype}")
        described[name] = {
            "properties": {
                "dtype": _TYPES[dtype],
                "replica_id": replicas,
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
            storage[f"('{name}', ({number},))"] = [
                {"file_name": file, "storage_rank": rank, "rank_group": holders[box]}
                for file, rank in places[name, box]
            ]
    return {"state_dict_metadata": described, "storage_data": storage}


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


Form = Literal["full", "distributed"]
_CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True)
class TargetFormat:
    """The form to write."""

    layout: Form = "full"
    """full (unsharded tensors), or distributed (one folder of shards per rank)."""

    parallel_config: ParallelConfig | None = None
    """How DST is sharded over MindSpore's ranks: data_parallel=2,model_parallel=4,
    pipeline_stage, enable_parallel_optimizer=true, optimizer_weight_shard_size,
    parallel_optimizer_threshold, vocab_emb_dp=false.
    """

    target_strategy: Path | None = None
    """Strategy files that define how DST is sharded over its ranks."""

    names: FamilyName | None = None
    """The family of names in DST; keep: as they are; unset: the usual one."""

    dtype: DtypeName | None = None
    """Of the weights; the optimizer's state stays."""

    remove_redundancy: bool = False
    """Write a slice that several ranks share only once."""

    iteration: bool = False
    """With --to mindspore: the newer form of MindSpore Transformers 2.x, iteration_N."""


def check(target: Path, target_format: TargetFormat) -> None:
    """Reject a target that exists, and a form that does not support its options."""
    refuse_taken(target)
    if (target_format.layout == "distributed") != (
        target_format.parallel_config is not None or target_format.target_strategy is not None
    ):
        raise CheckpointError(
            "layout distributed needs a parallel_config or strategy files; layout full needs "
            "neither"
        )


def rewrite(
    folder: Path,
    target: Path,
    target_format: TargetFormat,
    *,
    hints: MindSporeHints,
    progress: Progress | None = None,
) -> None:
    """Write all that MindSpore saved in ``folder`` into the new folder ``target``."""
    source = _renamed(folder, target_format, hints)
    write(source, folder, target, target_format, small=_small(folder, hints), progress=progress)


def write(
    source: TensorSource,
    folder: Path,
    target: Path,
    target_format: TargetFormat,
    *,
    small: Mapping[str, bytes],
    progress: Progress | None = None,
) -> None:
    """Write ``source``, which came from ``folder`` and has MindSpore's names."""
    naming, stages = naming_of(folder), None
    if target_format.target_strategy is not None:
        stages = open_strategy(target_format.target_strategy).stages
    elif target_format.layout == "distributed":
        config = target_format.parallel_config or ParallelConfig()
        stages = config.stages(sorted_out(source)[0])
    if stages is None and not target_format.iteration:
        write_full(source, target, small=small, progress=progress)
        return
    more: dict[str, Any] = {"small": small, "progress": progress, "stages": stages}
    more["remove_redundancy"] = target_format.remove_redundancy
    if target_format.iteration:
        write_iteration(source, target, prefix=naming.prefix, **more)
    else:
        write_distributed(source, target, naming=naming, **more)


def naming_of(folder: Path) -> Naming:
    """The names of the files of ranks that come from ``folder``: after the step it was saved at."""
    if has_manifest(folder):
        return Naming(step=open_checkpoint(folder).manifest.step)
    if form_of(folder) == "ranks" and (step := step_of(rank_files(folder)[0].name)) is not None:
        return Naming(step.prefix, step.epoch, step.step)
    return Naming()


def _renamed(folder: Path, target_format: TargetFormat, hints: MindSporeHints) -> TensorSource:
    """MindSpore's own content, under other names if requested."""
    parts = by_role(open_state(folder, hints))
    cut: TensorSource = JoinedSource(
        [("", cast(parts["model"], target_format.dtype)), ("", parts["optimizer"])]
    )
    if target_format.names not in (None, KEEP):
        plain = as_huggingface(cut, folder, replace(hints, names=None))
        cut = as_mindspore(plain, target_format.names, heads_near(folder, hints.base))
    return JoinedSource([("", cut), ("", parts["state"])])


def _small(folder: Path, hints: MindSporeHints) -> Mapping[str, bytes]:
    """The configuration and tokenizer of the base, or those beside the weights."""
    is_model = hints.base is not None and files.exists(hints.base / _CONFIG)
    model = hints.base if is_model else model_near(folder)
    if model is None:
        return {}
    return companions_of(model, model) | {_CONFIG: (model / _CONFIG).read_bytes()}


@dataclass(frozen=True)
class MindSporeFolder(TargetFormat, ModelTarget):
    """A folder for MindSpore Transformers, full or by rank."""

    def write(self, origin: Origin, target: Path, progress: Progress) -> Done:
        """Weights and, of checkpoints of Surefoot and MindSpore, moments and step numbers."""
        check(target, self)
        if detect_layout(origin.folder) == LAYOUT:
            hints = replace(hints_of(origin.reading, origin.base), names=None)
            rewrite(origin.folder, target, self, hints=hints, progress=progress)
        else:
            source, small = _opened(origin, self)
            write(source, origin.folder, target, self, small=small, progress=progress)
        notes = {"layout": self.layout}
        if self.iteration:
            return Done(notes, f"read it with checkpoint: {{load_path: {target}}}")
        inner = "/checkpoint" if self.layout == "distributed" else ""
        words = f"read it with load_checkpoint: {target}{inner}"
        return Done(notes, f"{words}, load_ckpt_format: safetensors")


def _opened(
    origin: Origin, target_format: TargetFormat
) -> tuple[TensorSource, Mapping[str, bytes]]:
    """Everything under MindSpore's names, and the companion files."""
    folder = origin.folder
    if not named(folder) and not _is_model(folder):
        model = origin.weights()
        small: Mapping[str, bytes] = {} if origin.base is None else companions(origin.base, model)
        heads, moments, numbers = heads_near(folder, origin.base), [], TensorsInMemory({})
    else:
        whole = origin.whole()
        model, small = whole.weights, whole.small
        heads, moments = heads_near(whole.folder), moments_of(model, folder)
        batch = whole.global_batch_size
        numbers = numbers_of(folder, batch) if moments else TensorsInMemory({})
    every = JoinedSource([("", cast(model, target_format.dtype)), *moments])
    renamed = as_mindspore(every, target_format.names, heads)
    return JoinedSource([("", renamed), ("", numbers)]), small


def _is_model(folder: Path) -> bool:
    """Whether it can be opened as a model: mere weights have no configuration."""
    layout = detect_layout(folder)
    if layout is None or not layout.is_whole_model:
        return False
    return layout.has_adapter_config or files.exists(folder / _CONFIG)


PART_SIZE = 3 << 30  # bytes of the largest file, as MindSpore's own merge
STRATEGY = "strategy"
_FORMAT = {"format": "ms", "remove_redundancy": "False"}
_DEDUPLICATED = {"format": "ms", "remove_redundancy": "True"}


Described = tuple[str, tuple[int, ...]]  # type and shape


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


@dataclass(frozen=True)
class PlannedFile:
    """A file to write, and the box of each tensor in it."""

    plan: FilePlan
    boxes: Mapping[str, Box]


def write_full(
    source: TensorSource,
    target: Path,
    *,
    small: Mapping[str, bytes] | None = None,
    part_size: int = PART_SIZE,
    progress: Progress | None = None,
) -> None:
    """Write unsharded tensors into the new folder ``target``, as ``unified_safetensors`` does."""
    tensors, numbers = sorted_out(source)
    groups = _balanced(tensors, part_size)
    parts = [file_of(PART.format(i), tensors, names, None) for i, names in enumerate(groups)]
    names = {name: part.plan.name for part in parts for name in part.boxes}
    total = sum(num_bytes(dtype, shape) for dtype, shape in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
    with new_folder(target) as folder:
        for part in parts:
            write_file(folder, part, source, progress)
        if numbers:
            hyper = file_of(HYPER, numbers, list(numbers), None, {"format": "ms"})
            write_file(folder, hyper, source, progress)
        files.write_new(folder / MAP, json.dumps(index, indent=4).encode())
        write_small(folder, small or {})


def write_distributed(
    source: TensorSource,
    target: Path,
    *,
    stages: Sequence[Layouts],
    naming: Naming = Naming(),
    remove_redundancy: bool = False,
    small: Mapping[str, bytes] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write every rank's slices into ``target/checkpoint/rank_N``, its strategy into
    ``target/strategy``. ``stages`` gives the layout of every tensor by pipeline stage; numbers
    of the training state go into every rank's file."""
    # Box by box from the source. transform_checkpoints of MindSpore 2.10 merges first (2.6 GB for a
    # model of 984 MB, 295 MB here), and where fewer ranks are left it writes wrong values into
    # every weight that is cut by columns (decisions/0032).
    tensors, numbers = sorted_out(source)
    whole = {name: Box.whole(shape) for name, (_, shape) in numbers.items()}
    metadata = _DEDUPLICATED if remove_redundancy else _FORMAT
    boxes_by_rank = rank_boxes(tensors, stages)
    if remove_redundancy:
        boxes_by_rank = without_replicas(tensors, boxes_by_rank)
    with new_folder(target) as folder:
        written: dict[tuple[bytes, tuple[Box, ...]], Path] = {}
        files.new_folder(folder / INNER)
        for rank, boxes in enumerate(boxes_by_rank):
            rank_folder = folder / INNER / f"rank_{rank}"
            files.new_folder(rank_folder)
            every = {**boxes, **whole}
            file = file_of(naming.file(rank), {**tensors, **numbers}, [*every], every, metadata)
            key = file.plan.head, tuple(boxes.values())
            # Ranks that are replicas have equal files, which need the space of one.
            if key not in written or not files.share(written[key], rank_folder / file.plan.name):
                write_file(rank_folder, file, source, progress)
                written[key] = rank_folder / file.plan.name
            files.write_new(rank_folder / META, naming.meta(rank))
            files.sync_folder(rank_folder)
        files.sync_folder(folder / INNER)
        _write_strategies(folder / STRATEGY, stages)
        write_small(folder, small or {})


def sorted_out(source: TensorSource) -> tuple[dict[str, Described], dict[str, Described]]:
    """The sharded tensors, and the numbers of the training state, which are replicated."""
    every = described(source)
    numbers = {n: every[n] for n, (_, shape) in every.items() if role_of(n, shape) == "state"}
    return {n: tensor for n, tensor in every.items() if n not in numbers}, numbers


def rank_boxes(tensors: Mapping[str, Described], stages: Sequence[Layouts]) -> list[dict[str, Box]]:
    """The box of every tensor on each rank."""
    names_in_strategy = {name for stage_layouts in stages for name in stage_layouts}
    if odd := sorted(tensors.keys() - names_in_strategy):
        raise CheckpointError(f"the strategy does not contain {odd[0][:200]!r}, so no rank has it")
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


def file_of(
    name: str,
    tensors: Mapping[str, Described],
    names: Sequence[str],
    boxes: Mapping[str, Box] | None,
    metadata: Mapping[str, str] = _FORMAT,
) -> PlannedFile:
    """The file that contains these boxes of tensors; full tensors if there are no boxes."""
    tensor_boxes = {n: Box.whole(tensors[n][1]) if boxes is None else boxes[n] for n in names}
    shapes = {n: (tensors[n][0], box.shape) for n, box in tensor_boxes.items()}
    plan = FilePlan(name, *build(shapes, metadata))
    return PlannedFile(plan, {n: tensor_boxes[n] for n in plan.header.entries})


def write_file(
    folder: Path, file: PlannedFile, source: TensorSource, progress: Progress | None = None
) -> None:
    """Write and flush a file from the source."""
    with files.create(folder / file.plan.name) as opened:
        opened.reserve(file.plan.header.file_size)
        opened.bypass_cache()
        fill_boxes(opened, source, file.plan.head, file.boxes, progress or silent)


def _write_strategies(folder: Path, stages: Sequence[Layouts]) -> None:
    files.new_folder(folder)
    ranks = count()
    for stage, layouts in enumerate(stages):
        data = dump_strategy(stage, layouts)
        for _ in range(next(iter(layouts.values())).num_devices):
            files.write_new(folder / FILE.format(next(ranks)), data)
    files.sync_folder(folder)
