"""Write any tensor source in MindSpore's form: unsharded, or a folder for every rank.

Every slice is read from its file and written to its place, block by block. So a change of layout
needs no merged copy, and no memory that grows with the model.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from ...checkpoint.disk.commit import new_folder, write_small
from ...checkpoint.disk.tensorfile import FilePlan, build, num_bytes
from ...checkpoint.sources.copying import Progress, described, fill_boxes, silent
from ...checkpoint.sources.source import TensorSource
from ...errors import CheckpointError
from ...parallel.box import Box
from ...storage import files
from .iteration import HYPER, MAP, PART
from .opening import META, role_of
from .ranks import INNER
from .strategy import FILE, Layouts, TensorLayout, dump_strategy

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
