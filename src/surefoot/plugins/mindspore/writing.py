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

from ...checkpoint.converting.model_files import companions
from ...checkpoint.converting.origin import Done, ModelTarget, Origin
from ...checkpoint.disk.commit import named, new_folder, refuse_taken, write_small
from ...checkpoint.disk.folder import companions_of, open_checkpoint
from ...checkpoint.disk.tensorfile import FilePlan, build, num_bytes
from ...checkpoint.layouts.detection import detect_layout, has_manifest
from ...checkpoint.sources.copying import DtypeName, Progress, cast, described, fill_boxes, silent
from ...checkpoint.sources.source import JoinedSource, TensorsInMemory, TensorSource, read_whole
from ...errors import CheckpointError
from ...parallel.box import Box
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
from .strategy import (
    ALL_COPIES,
    FILE,
    Layouts,
    ParallelConfig,
    TensorLayout,
    dump_strategy,
    open_strategy,
)

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
    alone = {name: Box.whole(shape) for name, (_, shape) in tensors.items()}
    held = [alone] if stages is None else held_by(tensors, stages)
    kept = once(tensors, held) if remove_redundancy else held
    common = _common(source, numbers)
    number = common["global_step"] or common["step_num"] or 0
    beside = {name: numbers[name] for name in _IN_FILES if name in numbers}
    planned = _planned(tensors, kept, beside, prefix)
    with new_folder(target) as folder:
        inner = folder / ITERATION.format(number)
        files.new_folder(inner)
        for _, file in planned:
            write_file(inner, file, source, progress)
        if stages is not None and len(held) > 1:
            places: dict[tuple[str, Box], list[tuple[str, int]]] = {}
            for rank, file in planned:
                for key in file.boxes.items():
                    places.setdefault(key, []).append((file.plan.name, rank))
            told = _metadata(tensors, stages, held, places)
            files.write_new(inner / METADATA, json.dumps(told, separators=(",", ":")).encode())
        files.write_new(inner / COMMON, json.dumps(common, indent=4).encode())
        files.sync_folder(inner)
        files.write_new(folder / TRACKER, str(number).encode())
        write_small(folder, small or {})


def _planned(
    tensors: Mapping[str, Described],
    kept: Sequence[Mapping[str, Box]],
    beside: Mapping[str, Described],
    prefix: str,
) -> list[tuple[int, PlannedFile]]:
    """The files of weights and of moments, with their ranks; a rank without tensors has none."""
    found = []
    for part, role in (("model", "model"), ("opt", "optimizer")):
        own = {
            rank: {n: box for n, box in boxes.items() if role_of(n, tensors[n][1]) == role}
            for rank, boxes in enumerate(kept)
        }
        own = {rank: boxes for rank, boxes in own.items() if boxes}
        for i, (rank, boxes) in enumerate(own.items()):
            name = f"{prefix}-{part}-{i:07d}-{len(own):07d}.safetensors"
            more = beside if role == "optimizer" else {}
            every = {**boxes, **{n: Box.whole(shape) for n, (_, shape) in more.items()}}
            file = file_of(name, {**tensors, **more}, list(every), every, _ITERATION_FORMAT)
            found.append((rank, file))
    return found


Places = Mapping[tuple[str, Box], Sequence[tuple[str, int]]]  # files and ranks of every slice


def _common(source: TensorSource, numbers: Mapping[str, Described]) -> dict[str, Any]:
    """The content of ``common.json``; null for what the source does not contain."""
    found = {
        name: read_whole(source, name).reshape(-1)[0].item() if name in numbers else None
        for name in _COMMON
    }
    return {**found, "consumed_samples": None, "ckpt_status": None}


def _metadata(
    tensors: Mapping[str, Described],
    stages: Sequence[Layouts],
    held: Sequence[Mapping[str, Box]],
    places: Places,
) -> dict[str, object]:
    """The entries of ``metadata.json`` for every tensor, and for the file of every slice."""
    described: dict[str, object] = {}
    storage: dict[str, object] = {}
    layouts = {name: layout for own in stages for name, layout in own.items()}
    for name, (dtype, shape) in tensors.items():
        counts = layouts[name].counts(len(shape))
        holders: dict[Box, list[int]] = {}
        ranks = [rank for rank, boxes in enumerate(held) if name in boxes]  # of its stage
        for rank in ranks:
            holders.setdefault(held[rank][name], []).append(rank)
        numbered = sorted((_number(box, shape, counts), box) for box in holders)
        replicas = [holders[held[rank][name]].index(rank) for rank in ranks]
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
    maps = [[last - axis for axis in own] for own in layout.axes(num_dims)]
    if layout.num_shards:
        used = {axis for own in layout.axes(num_dims) for axis in own}
        free = [axis for axis in range(len(matrix)) if axis not in used]
        copies = prod(matrix[axis] for axis in free)
        if layout.num_shards not in (ALL_COPIES, copies):
            raise CheckpointError(
                f"{name[:200]!r}: {layout.num_shards} shards over {copies} replicas; this form "
                "only supports shards over all of them"
            )
        maps[0] += [last - axis for axis in free]
    plain = [own[0] if len(own) == 1 else own or -1 for own in maps]
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


def check(target: Path, wanted: TargetFormat) -> None:
    """Reject a target that exists, and a form that does not support its options."""
    refuse_taken(target)
    if (wanted.layout == "distributed") != (
        wanted.parallel_config is not None or wanted.target_strategy is not None
    ):
        raise CheckpointError(
            "layout distributed needs a parallel_config or strategy files; layout full needs "
            "neither"
        )


def rewrite(
    folder: Path,
    target: Path,
    wanted: TargetFormat,
    *,
    theirs: MindSporeHints,
    progress: Progress | None = None,
) -> None:
    """Write all that MindSpore saved in ``folder`` into the new folder ``target``."""
    source = _renamed(folder, wanted, theirs)
    write(source, folder, target, wanted, small=_small(folder, theirs), progress=progress)


def write(
    source: TensorSource,
    folder: Path,
    target: Path,
    wanted: TargetFormat,
    *,
    small: Mapping[str, bytes],
    progress: Progress | None = None,
) -> None:
    """Write ``source``, which came from ``folder`` and has MindSpore's names."""
    naming, stages = naming_of(folder), None
    if wanted.target_strategy is not None:
        stages = open_strategy(wanted.target_strategy).stages
    elif wanted.layout == "distributed":
        config = wanted.parallel_config or ParallelConfig()
        stages = config.stages(sorted_out(source)[0])
    if stages is None and not wanted.iteration:
        write_full(source, target, small=small, progress=progress)
        return
    more: dict[str, Any] = {"small": small, "progress": progress, "stages": stages}
    more["remove_redundancy"] = wanted.remove_redundancy
    if wanted.iteration:
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


def _renamed(folder: Path, wanted: TargetFormat, theirs: MindSporeHints) -> TensorSource:
    """MindSpore's own content, under other names if requested."""
    parts = by_role(open_state(folder, theirs))
    cut: TensorSource = JoinedSource(
        [("", cast(parts["model"], wanted.dtype)), ("", parts["optimizer"])]
    )
    if wanted.names not in (None, KEEP):
        plain = as_huggingface(cut, folder, replace(theirs, names=None))
        cut = as_mindspore(plain, wanted.names, heads_near(folder, theirs.base))
    return JoinedSource([("", cut), ("", parts["state"])])


def _small(folder: Path, theirs: MindSporeHints) -> Mapping[str, bytes]:
    """The configuration and tokenizer of the base, or those beside the weights."""
    own = theirs.base if theirs.base and files.exists(theirs.base / _CONFIG) else None
    place = own or model_near(folder)
    if place is None:
        return {}
    return companions_of(place, place) | {_CONFIG: (place / _CONFIG).read_bytes()}


@dataclass(frozen=True)
class MindSporeFolder(TargetFormat, ModelTarget):
    """A folder for MindSpore Transformers, full or by rank."""

    def write(self, origin: Origin, target: Path, progress: Progress) -> Done:
        """Weights and, of checkpoints of Surefoot and MindSpore, moments and step numbers."""
        check(target, self)
        if detect_layout(origin.folder) == LAYOUT:
            theirs = replace(hints_of(origin.reading, origin.base), names=None)
            rewrite(origin.folder, target, self, theirs=theirs, progress=progress)
        else:
            source, small = _opened(origin, self)
            write(source, origin.folder, target, self, small=small, progress=progress)
        notes = {"layout": self.layout}
        if self.iteration:
            return Done(notes, f"read it with checkpoint: {{load_path: {target}}}")
        inner = "/checkpoint" if self.layout == "distributed" else ""
        words = f"read it with load_checkpoint: {target}{inner}"
        return Done(notes, f"{words}, load_ckpt_format: safetensors")


def _opened(origin: Origin, wanted: TargetFormat) -> tuple[TensorSource, Mapping[str, bytes]]:
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
    every = JoinedSource([("", cast(model, wanted.dtype)), *moments])
    return JoinedSource([("", as_mindspore(every, wanted.names, heads)), ("", numbers)]), small


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
        told = {"last_epoch": self.epoch, "last_step": self.step, "last_ckpt_file": self.file(rank)}
        return json.dumps(told).encode()


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
    total = sum(num_bytes(*one) for one in tensors.values())
    told = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
    with new_folder(target) as folder:
        for part in parts:
            write_file(folder, part, source, progress)
        if numbers:
            hyper = file_of(HYPER, numbers, list(numbers), None, {"format": "ms"})
            write_file(folder, hyper, source, progress)
        files.write_new(folder / MAP, json.dumps(told, indent=4).encode())
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
    tensors, numbers = sorted_out(source)
    whole = {name: Box.whole(shape) for name, (_, shape) in numbers.items()}
    metadata = _DEDUPLICATED if remove_redundancy else _FORMAT
    held = held_by(tensors, stages)
    if remove_redundancy:
        held = once(tensors, held)
    with new_folder(target) as folder:
        written: dict[tuple[bytes, tuple[Box, ...]], Path] = {}
        files.new_folder(folder / INNER)
        for rank, boxes in enumerate(held):
            own = folder / INNER / f"rank_{rank}"
            files.new_folder(own)
            every = {**boxes, **whole}
            file = file_of(naming.file(rank), {**tensors, **numbers}, [*every], every, metadata)
            key = file.plan.head, tuple(boxes.values())
            if key not in written or not files.share(written[key], own / file.plan.name):
                write_file(own, file, source, progress)
                written[key] = own / file.plan.name
            files.write_new(own / META, naming.meta(rank))
            files.sync_folder(own)
        files.sync_folder(folder / INNER)
        _write_strategies(folder / STRATEGY, stages)
        write_small(folder, small or {})


def sorted_out(source: TensorSource) -> tuple[dict[str, Described], dict[str, Described]]:
    """The sharded tensors, and the numbers of the training state, which are replicated."""
    found = described(source)
    numbers = {n: one for n, one in found.items() if role_of(n, one[1]) == "state"}
    return {n: one for n, one in found.items() if n not in numbers}, numbers


def held_by(tensors: Mapping[str, Described], stages: Sequence[Layouts]) -> list[dict[str, Box]]:
    """The box of every tensor on each rank."""
    known = {name for own in stages for name in own}
    if odd := sorted(tensors.keys() - known):
        raise CheckpointError(f"the strategy does not contain {odd[0][:200]!r}, so no rank has it")
    found = []
    for own in stages:
        layouts = {name: own[name] for name in tensors if name in own}
        for device in range(next(iter(own.values())).num_devices):
            boxes = {
                name: _box(name, layout, tensors[name][1], device)
                for name, layout in layouts.items()
            }
            found.append(boxes)
    return found


def _box(name: str, layout: TensorLayout, shape: tuple[int, ...], device: int) -> Box:
    try:
        return layout.box(shape, device)
    except CheckpointError as error:
        raise CheckpointError(f"{name[:200]!r} of shape {list(shape)}: {error}") from None


def once(
    tensors: Mapping[str, Described], held: Sequence[Mapping[str, Box]]
) -> list[dict[str, Box]]:
    """Replicated boxes in one rank each: the largest first, into the rank with the least so far."""
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, boxes in enumerate(held):
        for name, box in boxes.items():
            holders.setdefault((name, box), []).append(rank)
    found: list[dict[str, Box]] = [{} for _ in held]
    loads = [0] * len(held)
    sizes = {key: num_bytes(tensors[key[0]][0], key[1].shape) for key in holders}
    for name, box in sorted(holders, key=lambda key: (-sizes[key], key)):
        rank = min(holders[name, box], key=lambda rank: (loads[rank], rank))
        loads[rank] += sizes[name, box]
        found[rank][name] = box
    return found


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
    own = {n: Box.whole(tensors[n][1]) if boxes is None else boxes[n] for n in names}
    shapes = {n: (tensors[n][0], box.shape) for n, box in own.items()}
    plan = FilePlan(name, *build(shapes, metadata))
    return PlannedFile(plan, {n: own[n] for n in plan.header.entries})


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
    for stage, own in enumerate(stages):
        data = dump_strategy(stage, own)
        for _ in range(next(iter(own.values())).num_devices):
            files.write_new(folder / FILE.format(next(ranks)), data)
    files.sync_folder(folder)
