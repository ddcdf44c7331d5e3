"""Weights in pickles: of PyTorch's DCP, of the Trainer with FSDP, and of DeepSpeed.

DCP has boxes of tensors in files, and an index of them. DeepSpeed's ZeRO concatenates the trainable
weights in flat float32 buffers and gives every rank a part of them; where each tensor begins
follows from the order of names and shapes beside them. Buffers are mapped from their files, and a
part of a tensor is loaded when a box of it is read, so memory holds one part at a time. Objects in
these files are inert records (``pickles``): no class is built, and nothing is executed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.disk import strict_json
from ...checkpoint.disk.folder import DEEPSPEED, DISTRIBUTED
from ...checkpoint.disk.manifest import is_plain_name
from ...checkpoint.layouts.detection import detect_layout, is_deepspeed
from ...checkpoint.sources import Renamed, Shape, TensorSource
from ...errors import CheckpointError, counted
from ...parallel.sharding import Box, is_covered_once
from ...storage import files
from ...storage.weight_files import plain_names
from .pickles import expect_tensor, read_mapped, read_record, read_tensor

INDEX, FSDP = DISTRIBUTED
_TOP = "model"  # of ``dcp.save({"model": model.state_dict()})``
_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,9})_)?mp_rank_(\d{2,9})_model_states\.pt")
_OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,9})_mp_rank_(\d{2,9})_optim_states\.pt"
)
_LAYER = re.compile(r"(?:layer|expert|expp_rank)_\d.*_states\.pt")
_ALIGNED = 2  # ZeRO 2 rounds the length of a buffer up to this many values a rank


def open_weights(folder: Path, *, trust_pickle: bool) -> TensorSource | None:
    """The weights in ``folder``; None if it is none of these. Trainable weights of DeepSpeed are in
    float32, and of tied weights one is returned.

    Raises ``CheckpointError`` for pickles that the user does not trust, missing files, damage, and
    what is not supported: weights of DeepSpeed that are sharded by tensor or pipeline parallelism,
    and experts.
    """
    with files.raising(CheckpointError, f"cannot read {folder}"):
        # The Trainer puts FSDP's weights into a folder of the checkpoint.
        for inner in (folder, folder / FSDP):
            if files.exists(inner / INDEX):
                kind, place, read = "a distributed checkpoint of PyTorch", inner, _distributed
                where = place / INDEX
                break
        else:
            if detect_layout(folder) is not None or not is_deepspeed(folder):
                return None
            kind, place, read = "a checkpoint of DeepSpeed", _saved_last(folder), _deepspeed
            where = place
        if not trust_pickle:
            raise CheckpointError(
                f"{folder}: {kind}, in pickles; --trust-pickle reads them without building their "
                "classes or executing anything"
            )
        try:
            source = PickledSource(read(place))
        # A record has whatever the file says, so another layout may show as any of these.
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{where}: not in the layout of {kind} ({type(error).__name__}: {str(error)[:200]})"
            ) from None
    names = plain_names(source.shapes())
    return source if all(new == old for new, old in names.items()) else Renamed(source, names)


@dataclass(frozen=True)
class _Stored:
    """A tensor in boxes, and what loads the values of each."""

    shape: Shape
    dtype: torch.dtype
    parts: Mapping[Box, Callable[[], torch.Tensor]]


@dataclass(frozen=True)
class PickledSource:
    """Tensors in pickles. The last part is kept, as its boxes are read one after another."""

    tensors: Mapping[str, _Stored]
    _last: dict[tuple[str, Box], torch.Tensor] = field(
        default_factory=dict, repr=False, compare=False
    )

    def shapes(self) -> Mapping[str, Shape]:
        """Their full shapes."""
        return {name: stored.shape for name, stored in self.tensors.items()}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Those in the files: float32 for what DeepSpeed trains."""
        return {name: stored.dtype for name, stored in self.tensors.items()}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A copy of ``box``; only parts with values of it are loaded."""
        stored = self.tensors[name]
        values = torch.empty(box.shape, dtype=stored.dtype)
        for part, load in stored.parts.items():
            if (common := box & part) is not None:
                if (name, part) not in self._last:
                    self._last.clear()
                    self._last[name, part] = load()
                loaded = self._last[name, part]
                values[common.slices_in(box)] = loaded[common.slices_in(part)]
        return values


# PyTorch's distributed checkpoints


def _distributed(place: Path) -> dict[str, _Stored]:
    """The weights in the index; other saved states are ignored."""
    with files.open_file(place / INDEX) as file:
        index = read_record(files.read_all(file, 1 << 30), str(place / INDEX))
    places: dict[tuple[str, tuple[int, ...]], Any] = {}
    for key, entry in index["storage_data"].items():
        if (offset := key.get("offset")) is not None:
            places[key["fqn"], tuple(offset)] = entry
    opened: dict[str, files.File] = {}
    stored = {}
    for name, fqn in _names_in_the_model(index).items():
        tensor = index["state_dict_metadata"][fqn]
        shape, dtype = tuple(tensor["size"]), tensor["properties"].state[0]
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{name[:200]}: no dtype")
        boxes = {Box(tuple(c["offsets"]), tuple(c["sizes"])): None for c in tensor["chunks"]}
        # A rank may have nothing of a small tensor, but a tensor without values must have one box.
        filled = [box for box in boxes if box.size] or list(boxes)[:1]
        if not is_covered_once(Box.whole(shape), filled):
            raise CheckpointError(
                f"{place}: tensor {name[:200]!r}: its boxes do not cover it exactly once"
            )
        stored[name] = _Stored(
            shape,
            dtype,
            {
                box: partial(
                    _part, *_archive(place, opened, places[fqn, box.start]), name, box, dtype
                )
                for box in filled
            },
        )
    return stored


def _names_in_the_model(index: Any) -> dict[str, str]:
    """The tensors of the model, by their names in it: its own, or those under ``model``."""
    ways = index["planner_data"] or {}
    tensors = {
        fqn: tuple(ways.get(fqn, (fqn,)))
        for fqn, saved in index["state_dict_metadata"].items()
        if saved.name == "TensorStorageMetadata"
    }
    inside = {way[1]: fqn for fqn, way in tensors.items() if way[0] == _TOP and len(way) == 2}
    names = inside or {way[0]: fqn for fqn, way in tensors.items() if len(way) == 1}
    if not names:
        raise CheckpointError("it contains no weights: neither tensors, nor tensors under `model`")
    return names


def _archive(
    folder: Path, opened: dict[str, files.File], place: Any
) -> tuple[files.File, int, int]:
    """A file, and offset and length of the archive of ``torch.save`` in it at ``place``."""
    name = place["relative_path"]
    # The index may be anybody's: it must not lead out of the folder.
    if not is_plain_name(name) or "/" in name:
        raise CheckpointError(f"{folder / INDEX}: {name[:200]!r} is not a file in this folder")
    if place.get("transform_descriptors"):
        raise CheckpointError(
            f"{folder / name}: it is compressed or encrypted; read it with PyTorch"
        )
    # Opened once: one file has many boxes, which are read later.
    if name not in opened:
        opened[name] = files.open_inside(folder, name)
    offset, length = int(place["offset"]), int(place["length"])
    if not 0 <= offset <= offset + length <= opened[name].size:
        raise CheckpointError(
            f"{folder / name}: it ends before the tensors that are listed in {INDEX}"
        )
    return opened[name], offset, length


def _part(
    file: files.File, offset: int, length: int, name: str, box: Box, dtype: torch.dtype
) -> torch.Tensor:
    """The values of one box."""
    where = f"{file.path}: {name[:200]}"
    with files.raising(CheckpointError):
        values = read_tensor(file.read(offset, length), where)
    if (values.dtype, tuple(values.shape)) != (dtype, box.shape):
        raise CheckpointError(
            f"{where}: {list(values.shape)} of {values.dtype}, expected "
            f"{list(box.shape)} of {dtype}"
        )
    return values


# DeepSpeed


def _saved_last(folder: Path) -> Path:
    """``global_step500``, or the folder whose file ``latest`` names it."""
    latest = folder / DEEPSPEED[0]
    if not files.exists(latest):
        return folder
    with files.open_file(latest) as file:
        tag = files.read_all(file, strict_json.MAX_BYTES).decode(errors="replace").strip()
    if not is_plain_name(tag) or not files.is_folder(folder / tag):
        raise CheckpointError(f"{latest}: {tag[:200]!r} is no folder beside it")
    return folder / tag


def _deepspeed(place: Path) -> dict[str, _Stored]:
    names = files.list_folder(place)
    if layer := next((name for name in names if _LAYER.fullmatch(name)), None):
        raise CheckpointError(
            f"{place / layer}: separately saved pipeline layers or experts are not supported; "
            "merge them with DeepSpeed"
        )
    models, optimizers = _ranks(place, names, _MODEL), _ranks(place, names, _OPTIMIZER)
    if not models:
        raise CheckpointError(f"{place}: it has no mp_rank_00_model_states.pt of DeepSpeed")
    if {*models, *optimizers} != {0}:
        raise CheckpointError(
            f"{place}: a model sharded by tensor or pipeline parallelism (mp_rank_01), whose cut "
            "is not in its files; merge it with the program that trained it"
        )
    return _zero(place, models[0], optimizers.get(0, []))


def _ranks(place: Path, names: Sequence[str], pattern: re.Pattern[str]) -> dict[int, list[Path]]:
    """The files of that kind by their part of the model, in order of data-parallel ranks."""
    parts: dict[int, dict[int, Path]] = {}
    for match in filter(None, map(pattern.fullmatch, names)):
        part, rank = int(match[2]), int(match[1] or 0)
        if rank in parts.setdefault(part, {}):
            other = parts[part][rank].name
            raise CheckpointError(f"{place / match[0]}: {other} is of the same rank; two saves?")
        parts[part][rank] = place / match[0]
    for part, by_rank in parts.items():
        if missing := sorted(set(range(max(by_rank) + 1)) - by_rank.keys()):
            raise CheckpointError(f"{place}: the files of rank {missing[0]} ({part=}) are missing")
    return {part: [by_rank[r] for r in range(len(by_rank))] for part, by_rank in parts.items()}


def _zero(place: Path, models: Sequence[Path], optimizers: Sequence[Path]) -> dict[str, _Stored]:
    states = [read_mapped(path) for path in models]
    shapes = _trained_shapes(states[0])
    if not shapes:  # without ZeRO: whole in one file
        return _with_others(states[0], {})
    shards = [read_mapped(path)["optimizer_state_dict"] for path in optimizers]
    counts = [shard["partition_count"] for shard in shards]
    num_ranks = {int(max(count) if isinstance(count, list) else count) for count in counts}
    if num_ranks != {len(shards)}:
        raise CheckpointError(
            f"{place}: {counted(len(shards), 'file')} of ranks (…_optim_states.pt), expected "
            f"{max(num_ranks, default='some')}; or they are of several saves"
        )
    is_zero_3 = "zero_pp_rank" in models[0].name
    key = "fp32_flat_groups" if is_zero_3 else "single_partition_of_fp32_groups"
    flat = [[expect_tensor(buffer, f"{place}: {key}") for buffer in shard[key]] for shard in shards]
    if not is_zero_3:
        paddings = shards[0].get("param_alignment_paddings")
        return _with_others(states[0], dict(_by_group(place, shapes, flat, paddings)))
    if len(states) != len(flat):
        weights = counted(len(states), "file")
        raise CheckpointError(f"{place}: {weights} of weights, {len(flat)} of optimizers")
    return dict(_by_rank(place, shapes, flat)) | dict(_untrained(place, states))


def _trained_shapes(state: Any) -> list[dict[str, Shape]]:
    """The shapes of trainable weights, by name, in the order and groups of the buffers."""
    if state.get("ds_autoep_layers") or state.get("num_experts"):
        raise CheckpointError("experts are not supported; merge them with DeepSpeed")
    return [{n: tuple(shape) for n, shape in d.items()} for d in state["param_shapes"] or []]


def _with_others(state: Any, trained: Mapping[str, _Stored]) -> dict[str, _Stored]:
    """All weights of a model: the ``trained`` ones, and the others as saved with it."""
    shared, stored = state.get("shared_params") or {}, dict(trained)
    for name, tensor in state["module"].items():
        if name not in stored and shared.get(name) not in state["module"]:
            stored[name] = _whole(tensor, name)
    return stored


def _by_group(
    place: Path,
    shapes: Sequence[Mapping[str, Shape]],
    flat: Sequence[Sequence[torch.Tensor]],
    paddings: Sequence[Sequence[int]] | None,
) -> Iterator[tuple[str, _Stored]]:
    """ZeRO 1 and 2: each group's parameters concatenated, and divided among the ranks."""
    for i, group in enumerate(shapes):
        buffers = [groups[i] for groups in flat]
        gaps = paddings[i] if paddings else [0] * len(group)
        start = 0
        for (name, shape), gap in zip(group.items(), gaps, strict=True):
            size = Box.whole(shape).size
            yield name, _joined(place, name, shape, tuple(_cut(buffers, start, size)))
            start += size + gap
        left = sum(buffer.numel() for buffer in buffers) - start
        if left >= _ALIGNED * len(buffers):
            raise CheckpointError(
                f"{place}: {counted(left, 'value')} of group {i} without a tensor"
            )


def _by_rank(
    place: Path,
    shapes: Sequence[Mapping[str, Shape]],
    flat: Sequence[Sequence[torch.Tensor]],
) -> Iterator[tuple[str, _Stored]]:
    """ZeRO 3: each parameter divided among the ranks, and each rank's parts concatenated."""
    start = 0
    for name, shape in ((n, s) for group in shapes for n, s in group.items()):
        size = Box.whole(shape).size
        share = -(-size // len(flat))  # the last ranks' parts end in padding
        parts = [part for buffers in flat for part in _cut(buffers, start, share)]
        yield name, _joined(place, name, shape, tuple(_cut(parts, 0, size)))
        start += share
    for rank, buffers in enumerate(flat):
        if (size := sum(buffer.numel() for buffer in buffers)) != start:
            values = counted(size, "value")
            raise CheckpointError(f"{place}: {values} of rank {rank}, expected {start:,}")


def _untrained(place: Path, states: Sequence[Any]) -> Iterator[tuple[str, _Stored]]:
    """ZeRO 3: the other tensors. Buffers are replicated; frozen weights are sharded."""
    first = states[0]
    for name in first["buffer_names"]:
        yield name, _whole(first["module"][name], name)
    for name, saved_shape in (first.get("frozen_param_shapes") or {}).items():
        shape = tuple(saved_shape)
        parts = [expect_tensor(s["frozen_param_fragments"][name], name) for s in states]
        yield name, _joined(place, name, shape, tuple(_cut(parts, 0, Box.whole(shape).size)))


def _whole(value: object, name: str) -> _Stored:
    """A tensor in one place."""
    tensor = expect_tensor(value, name)
    shape = tuple(tensor.shape)
    return _Stored(shape, tensor.dtype, {Box.whole(shape): lambda: tensor})


def _joined(place: Path, name: str, shape: Shape, parts: tuple[torch.Tensor, ...]) -> _Stored:
    """A tensor whose values in row-major order are those of the ``parts``, concatenated."""
    size, expected = sum(part.numel() for part in parts), Box.whole(shape).size
    if size != expected or len({part.dtype for part in parts}) > 1:
        raise CheckpointError(
            f"{place}: {name[:200]}: {counted(size, 'value')} found, expected {expected:,}; is the "
            "file of a rank of another save?"
        )
    parts = parts or (torch.empty(0),)

    def load() -> torch.Tensor:
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(shape)

    return _Stored(shape, parts[0].dtype, {Box.whole(shape): load})


def _cut(buffers: Sequence[torch.Tensor], first: int, count: int) -> Iterator[torch.Tensor]:
    """``count`` values from the ``first`` on of concatenated buffers; fewer if these end."""
    bounds = [0, *accumulate(buffer.numel() for buffer in buffers)]
    for buffer, (start, stop) in zip(buffers, pairwise(bounds), strict=True):
        low, high = max(start, first), min(stop, first + count)
        if low < high:
            yield buffer.flatten()[low - start : high - start]
