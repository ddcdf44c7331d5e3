"""DeepSpeed's checkpoints, ZeRO 1 to 3 and universal: the weights, trainable ones in float32.

ZeRO concatenates the trainable weights in flat float32 buffers and gives every rank a part of them;
the position of each tensor follows from the order of names and shapes beside them. Buffers are
mapped from their files, and objects that are pickled beside them are inert records (``pickles``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.disk import strict_json
from ...checkpoint.disk.manifest import is_plain_name
from ...checkpoint.sources.source import Shape
from ...checkpoint.sources.weights import DEEPSPEED
from ...errors import CheckpointError, counted
from ...parallel.box import Box
from ...storage import files
from .pickles import expect_tensor, read_mapped

UNIVERSAL = "zero"  # the folder of a universal checkpoint: a folder for every parameter
_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,9})_)?mp_rank_(\d{2,9})_model_states\.pt")
_OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,9})_mp_rank_(\d{2,9})_optim_states\.pt"
)
_LAYER = re.compile(r"(?:layer|expert|expp_rank)_\d.*_states\.pt")
_ALIGNED = 2  # ZeRO 2 rounds the length of a buffer up to this many values a rank


def open_deepspeed(folder: Path, *, trust_pickle: bool = False) -> FlatBufferSource:
    """The weights of a checkpoint: ``global_step500``, or the folder whose ``latest`` names it.

    Of tied weights one is returned. Raises ``CheckpointError`` for pickles that the user does not
    trust, a missing rank, damage, and unsupported forms: weights sharded by tensor or pipeline
    parallelism (except in universal checkpoints), and experts.
    """
    if not trust_pickle:
        raise CheckpointError(
            f"{folder}: a checkpoint of DeepSpeed, whose files are pickles; --trust-pickle "
            "reads them without building their classes or executing anything"
        )
    place = _place(folder)
    names = files.list_folder(place)
    if odd := next((n for n in names if _LAYER.fullmatch(n)), None):
        raise CheckpointError(
            f"{place / odd}: separately saved pipeline layers or experts are not supported; "
            "merge them with DeepSpeed"
        )
    ranks = _ranks(place, names, _MODEL)
    if not ranks:
        raise CheckpointError(f"{place}: it has no mp_rank_00_model_states.pt of DeepSpeed")
    try:
        if files.is_folder(place / UNIVERSAL):
            return FlatBufferSource(_universal(place, ranks))
        return FlatBufferSource(_zero(place, ranks, _ranks(place, names, _OPTIMIZER)))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{place}: not in DeepSpeed's layout ({type(error).__name__}: {str(error)[:200]})"
        ) from None


def _place(folder: Path) -> Path:
    for name in DEEPSPEED[:2]:
        if files.exists(folder / name):
            with files.open_file(folder / name) as file:
                tag = files.read_all(file, strict_json.MAX_BYTES).decode(errors="replace").strip()
            if not is_plain_name(tag) or not files.is_folder(folder / tag):
                raise CheckpointError(f"{folder / name}: {tag[:200]!r} is no folder beside it")
            return folder / tag
    return folder


def _ranks(place: Path, names: Sequence[str], pattern: re.Pattern[str]) -> dict[int, list[Path]]:
    """The files of that kind by their part of the model, in order of data-parallel ranks."""
    found: dict[int, dict[int, Path]] = {}
    for match in filter(None, map(pattern.fullmatch, names)):
        part, rank = int(match[2]), int(match[1] or 0)
        if rank in found.setdefault(part, {}):
            other = found[part][rank].name
            raise CheckpointError(f"{place / match[0]}: {other} is of the same rank; two saves?")
        found[part][rank] = place / match[0]
    for part, of_rank in found.items():
        if missing := sorted(set(range(max(of_rank) + 1)) - of_rank.keys()):
            raise CheckpointError(f"{place}: the files of rank {missing[0]} ({part=}) are missing")
    return {part: [of_rank[r] for r in range(len(of_rank))] for part, of_rank in found.items()}


def _zero(
    place: Path, models: Mapping[int, list[Path]], optimizers: Mapping[int, list[Path]]
) -> dict[str, Spread]:
    if {*models, *optimizers} != {0}:
        raise CheckpointError(
            f"{place}: a model sharded by tensor or pipeline parallelism (mp_rank_01); convert "
            "it to a universal checkpoint with DeepSpeed's ds_to_universal.py first"
        )
    states = [read_mapped(path) for path in models[0]]
    shapes = _shapes(states[0])
    if not shapes:  # without ZeRO: whole in one file
        return _module(states[0], {})
    cuts = [read_mapped(path)["optimizer_state_dict"] for path in optimizers.get(0, [])]
    counts = [one["partition_count"] for one in cuts]
    wanted = {int(max(count) if isinstance(count, list) else count) for count in counts}
    if wanted != {len(cuts)}:
        count = max(wanted, default="some")
        raise CheckpointError(
            f"{place}: {counted(len(cuts), 'file')} of ranks (…_optim_states.pt), expected "
            f"{count}; or they are of several saves"
        )
    is_cut = "zero_pp_rank" in models[0][0].name  # ZeRO 3
    key = "fp32_flat_groups" if is_cut else "single_partition_of_fp32_groups"
    flat = [[expect_tensor(buffer, f"{place}: {key}") for buffer in one[key]] for one in cuts]
    if not is_cut:
        paddings = cuts[0].get("param_alignment_paddings")
        return _module(states[0], dict(_by_group(place, shapes, flat, paddings)))
    if len(states) != len(flat):
        found = counted(len(states), "file")
        raise CheckpointError(f"{place}: {found} of weights, {len(flat)} of optimizers")
    return dict(_by_rank(place, shapes, flat)) | dict(_kept(place, states))


def _shapes(told: Any) -> list[dict[str, tuple[int, ...]]]:
    """The shapes of trainable weights, by name, in the order and groups of the buffers."""
    if told.get("ds_autoep_layers") or told.get("num_experts"):
        raise CheckpointError("experts are not supported; merge them with DeepSpeed")
    return [{n: tuple(shape) for n, shape in d.items()} for d in told["param_shapes"] or []]


def _module(state: Any, learned: Mapping[str, Spread]) -> dict[str, Spread]:
    """All weights of a model: the trained ones (``learned``), the others as saved with it."""
    shared, found = state.get("shared_params") or {}, dict(learned)
    for name, tensor in state["module"].items():
        if name not in found and shared.get(name) not in state["module"]:
            found[name] = _whole(tensor, name)
    return found


def _by_group(
    place: Path,
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    flat: Sequence[Sequence[torch.Tensor]],
    paddings: Sequence[Sequence[int]] | None,
) -> Iterator[tuple[str, Spread]]:
    """ZeRO 1 and 2: each group's parameters concatenated, and divided among the ranks."""
    for i, group in enumerate(shapes):
        buffers = [own[i] for own in flat]
        gaps = paddings[i] if paddings is not None else [0] * len(group)
        at = 0
        for (name, shape), gap in zip(group.items(), gaps, strict=True):
            runs = tuple(cut(buffers, at, Box.whole(shape).size))
            yield name, _spread(place, name, shape, runs)
            at += Box.whole(shape).size + gap
        left = sum(buffer.numel() for buffer in buffers) - at
        if left >= _ALIGNED * len(buffers):
            extra = counted(left, "value")
            raise CheckpointError(f"{place}: {extra} of group {i} without a tensor")


def _by_rank(
    place: Path,
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    flat: Sequence[Sequence[torch.Tensor]],
) -> Iterator[tuple[str, Spread]]:
    """ZeRO 3: each parameter divided among the ranks, and each rank's parts concatenated."""
    at = 0
    for name, shape in ((n, s) for group in shapes for n, s in group.items()):
        share = -(-Box.whole(shape).size // len(flat))
        parts = [part for buffers in flat for part in cut(buffers, at, share)]
        size = Box.whole(shape).size  # the last ranks' parts end in padding
        yield name, _spread(place, name, shape, tuple(cut(parts, 0, size)))
        at += share
    for rank, buffers in enumerate(flat):
        if (size := sum(buffer.numel() for buffer in buffers)) != at:
            values = counted(size, "value")
            raise CheckpointError(f"{place}: {values} of rank {rank}, expected {at:,}")


def _spread(
    place: Path, name: str, shape: tuple[int, ...], parts: tuple[torch.Tensor, ...]
) -> Spread:
    size, expected = sum(part.numel() for part in parts), Box.whole(shape).size
    if size != expected or len({part.dtype for part in parts}) > 1:
        raise CheckpointError(
            f"{place}: {name[:200]}: {counted(size, 'value')} found, expected {expected:,}; is the "
            "file of a rank of another save?"
        )
    return Spread(shape, parts or (torch.empty(0),))


def _kept(place: Path, states: Sequence[Any]) -> Iterator[tuple[str, Spread]]:
    """ZeRO 3: the other tensors. Buffers are replicated; frozen weights are sharded."""
    first = states[0]
    for name in first["buffer_names"]:
        yield name, _whole(first["module"][name], name)
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        parts = [expect_tensor(s["frozen_param_fragments"][name], name) for s in states]
        kept = tuple(cut(parts, 0, Box.whole(tuple(shape)).size))
        yield name, _spread(place, name, tuple(shape), kept)


def _universal(place: Path, models: Mapping[int, list[Path]]) -> dict[str, Spread]:
    """A folder for every parameter, unsharded: with its shape, or flat (from ZeRO 3)."""
    states = [read_mapped(path) for path in models[0]]
    first = states[0]
    shapes = {name: shape for group in _shapes(first) for name, shape in group.items()}
    is_cut = len(models) > 1
    found: dict[str, Spread] = {}
    for name in sorted(files.list_folder(place / UNIVERSAL)):
        inner = place / UNIVERSAL / name
        if not files.is_folder(inner):
            continue
        if is_cut and not files.exists(inner / "exp_avg.pt"):
            raise CheckpointError(
                f"{inner}: it was frozen, and DeepSpeed keeps only one part of {len(models)} of "
                "such weights in a universal checkpoint"
            )
        content = read_mapped(inner / "fp32.pt")
        is_flat = not isinstance(content, dict) and name in shapes
        tensor = expect_tensor(content["param"] if isinstance(content, dict) else content, name)
        shape = shapes[name] if is_flat else tuple(tensor.shape)
        found[name] = _spread(place, name, shape, (tensor,))
    if missing := sorted(shapes.keys() - found.keys()):
        raise CheckpointError(f"{place / UNIVERSAL}: {missing[0]} is missing")
    if is_cut:
        return found
    shared, buffers = first.get("shared_params") or {}, set(first["buffer_names"])
    kept = {n: s for n, s in found.items() if n not in buffers and shared.get(n) not in found}
    is_whole = "zero_pp_rank" not in models[0][0].name
    return _module(first, kept) if is_whole else kept | dict(_kept(place, states))


@dataclass(frozen=True)
class Spread:
    """A tensor: its values in row-major order are those of the parts, concatenated."""

    shape: Shape
    parts: tuple[torch.Tensor, ...]


def _whole(tensor: object, name: str) -> Spread:
    """A tensor in one place."""
    found = expect_tensor(tensor, name)
    return Spread(tuple(found.shape), (found,))


def cut(buffers: Sequence[torch.Tensor], first: int, count: int) -> Iterator[torch.Tensor]:
    """``count`` values from the ``first`` on of concatenated buffers; fewer if these end."""
    bounds = [0, *accumulate(buffer.numel() for buffer in buffers)]
    for buffer, (start, stop) in zip(buffers, pairwise(bounds), strict=True):
        low, high = max(start, first), min(stop, first + count)
        if low < high:
            yield buffer.flatten()[low - start : high - start]


@dataclass(frozen=True)
class FlatBufferSource:
    """Tensors whose values are parts of buffers."""

    tensors: Mapping[str, Spread]

    def shapes(self) -> Mapping[str, Shape]:
        """Their full shapes."""
        return {name: spread.shape for name, spread in self.tensors.items()}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """As stored."""
        return {name: spread.parts[0].dtype for name, spread in self.tensors.items()}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A copy of ``box``; a tensor in several parts is put together first."""
        spread = self.tensors[name]
        parts = spread.parts
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        return values.reshape(spread.shape)[box.slices_in(Box.whole(spread.shape))].clone()
