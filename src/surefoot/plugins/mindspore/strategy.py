"""How every tensor of a pipeline stage is sliced over its devices: as MindSpore's strategy files
say, and as MindSpore Transformers does it for a ``parallel_config``.

Strategy files are protocol buffers with the ending ``.ckpt``, or JSON. A merged file covers all
stages, with the stage's number as a prefix of the names. They contain no ranks and usually no
shapes; the reader must check that they fit the files beside them. The wire format of protocol
buffers is read as far as strategy files need it. No length is trusted.

The slice of a tensor on a device is MindSpore's arithmetic of tensor layouts. Pure. Devices form a
matrix; a tensor's dimension is sharded along some of its axes, into equal parts. An axis that
shards no dimension contains replicas. The optimizer may shard dimension 0 of these again (optimizer
parallelism), so that no two devices have the same slice.

For a ``parallel_config``, weights of projections are sharded as in Megatron: queries, keys, values
and the up-projections by rows, the down-projections by columns; embedding and head only without
``vocab_emb_dp``. Pipeline stages have equal numbers of layers, and the optimizer's shards follow
the remaining replicas.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

from ...checkpoint.disk import strict_json
from ...checkpoint.disk.tensorfile import num_bytes
from ...errors import CheckpointError, counted
from ...parallel.sharding import Box
from ...schema.named_values import pairs
from ...storage import files

Value = int | bytes
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_LONGEST_VARINT = 10  # of a varint: 64 bits by 7


def wire_fields(data: bytes, where: str) -> Iterator[tuple[int, Value]]:
    """The number and value of every field, in order. ``where`` names the file in errors."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at, where)
        number, kind = key >> 3, key & 7
        if not number:
            raise _damaged(where, at)
        value: Value
        if kind == _VARINT:
            value, at = _varint(data, at, where)
        else:
            if kind == _BYTES:
                length, at = _varint(data, at, where)
            elif kind in _FIXED:
                length = _FIXED[kind]
            else:
                raise _damaged(where, at)
            if at + length > len(data):
                raise _damaged(where, at)
            value, at = data[at : at + length], at + length
        yield number, value


def integers(values: Sequence[Value], where: str) -> tuple[int, ...]:
    """A repeated field of signed integers, packed or not."""
    numbers: list[int] = []
    for value in values:
        if isinstance(value, int):
            numbers.append(_signed(value))
            continue
        at = 0
        while at < len(value):
            number, at = _varint(value, at, where)
            numbers.append(_signed(number))
    return tuple(numbers)


def integer(number: int, value: int) -> bytes:
    """A field of one integer."""
    return _encoded(number << 3 | _VARINT) + _encoded(value)


def packed(number: int, values: Sequence[int]) -> bytes:
    """A field of several integers."""
    return message(number, b"".join(map(_encoded, values)))


def message(number: int, content: bytes) -> bytes:
    """A field of bytes: text, or a message."""
    return _encoded(number << 3 | _BYTES) + _encoded(len(content)) + content


def _varint(data: bytes, at: int, where: str) -> tuple[int, int]:
    value = 0
    for i, byte in enumerate(data[at : at + _LONGEST_VARINT]):
        value |= (byte & 127) << 7 * i
        if byte < 128:
            # Ten groups of 7 bits are 70; as in protocol buffers, those beyond 64 do not count.
            return value & (1 << 64) - 1, at + i + 1
    raise _damaged(where, at)


def _encoded(value: int) -> bytes:
    left, encoded = value & (1 << 64) - 1, bytearray()
    while left > 127:
        encoded.append(left & 127 | 128)
        left >>= 7
    encoded.append(left)
    return bytes(encoded)


def _signed(value: int) -> int:
    # The -1 of a tensor map is written as 64 ones.
    return value - (1 << 64) if value >> 63 else value


def _damaged(where: str, at: int) -> CheckpointError:
    return CheckpointError(f"{where}: not a strategy file of MindSpore, or damaged at byte {at}")


ALL_COPIES = -1  # as a number of shards: over all devices that hold copies
_WHOLE = -1  # in a tensor map: no axis cuts this dimension

Cut = tuple[int, int]  # into how many parts, and which of them


@dataclass(frozen=True)
class TensorLayout:
    """The layout of one tensor on the devices of its pipeline stage, as in a strategy file."""

    device_matrix: tuple[int, ...]
    tensor_map: tuple[tuple[int, ...], ...]  # one for all dimensions, or one for each
    num_shards: int = 0  # of the optimizer, within what the matrix leaves; 0: it cuts nothing
    step: int = 0  # between the devices that share these shards; follows from the rest

    @property
    def num_devices(self) -> int:
        """Of the stage."""
        return prod(self.device_matrix)

    def axes(self, num_dims: int) -> tuple[tuple[int, ...], ...]:
        """The axes of the matrix, counted from the left, that shard each dimension."""
        maps = self.tensor_map
        if len(maps) == 1 and len(maps[0]) == num_dims:
            maps = tuple((axis,) for axis in maps[0])
        if len(maps) != num_dims:
            sharded = counted(len(maps), "dimension")
            raise CheckpointError(f"it is sharded in {sharded} and has {num_dims}")
        last = len(self.device_matrix) - 1
        # a tensor map counts axes from the right
        sharding = tuple(tuple(last - axis for axis in row if axis != _WHOLE) for row in maps)
        flat = [axis for dim_axes in sharding for axis in dim_axes]
        if len(set(flat)) < len(flat) or not all(0 <= axis <= last for axis in flat):
            raise CheckpointError(f"tensor map {maps} does not fit the devices {self._matrix}")
        return sharding

    def counts(self, num_dims: int) -> tuple[int, ...]:
        """The number of parts of each dimension."""
        return tuple(count * shards for (count, _), (shards, _) in self._cuts(num_dims, 0))

    def box(self, shape: tuple[int, ...], device: int) -> Box:
        """The slice of a full tensor on one device of the stage; parts must be equal."""
        start, extent = [], []
        for length, (outer, inner) in zip(shape, self._cuts(len(shape), device), strict=True):
            parts = outer[0] * inner[0]
            if length % parts:
                raise CheckpointError(f"a dimension of {length} is not {parts} equal parts")
            part = length // parts
            start.append((outer[1] * inner[0] + inner[1]) * part)
            extent.append(part)
        return Box(tuple(start), tuple(extent))

    def whole(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """The full shape of the tensor of which each device has a ``part``."""
        return tuple(n * count for n, count in zip(part, self.counts(len(part)), strict=True))

    def _cuts(self, num_dims: int, device: int) -> list[tuple[Cut, Cut]]:
        """For each dimension, its shards by the matrix, and then by the optimizer."""
        places, cuts = self._places(device), list[tuple[Cut, Cut]]()
        for dim_axes in self.axes(num_dims):
            count, index = 1, 0
            for axis in dim_axes:
                size = self.device_matrix[axis]
                count, index = count * size, index * size + places[axis]
            cuts.append(((count, index), (1, 0)))
        if self.num_shards and cuts:
            used = {axis for dim_axes in self.axes(num_dims) for axis in dim_axes}
            cuts[0] = cuts[0][0], self._shard(places, used)
        return cuts

    def _places(self, device: int) -> list[int]:
        """The position of a device along every axis, the last one fastest."""
        places = []
        for size in reversed(self.device_matrix):
            device, place = divmod(device, size)
            places.append(place)
        return places[::-1]

    def _shard(self, places: list[int], used: set[int]) -> Cut:
        """The optimizer's shards: over axes of replicas, from the right, until they are enough."""
        free = [axis for axis in range(len(places)) if axis not in used]
        copies = prod(self.device_matrix[axis] for axis in free)
        count = copies if self.num_shards == ALL_COPIES else self.num_shards
        left, index, weight = count, 0, 1
        for axis in reversed(free):
            part = min(self.device_matrix[axis], left)
            if left % part or self.device_matrix[axis] % part:
                break
            index += places[axis] % part * weight
            weight, left = weight * part, left // part
        if left != 1 or count < 1:
            raise CheckpointError(
                f"{self.num_shards} shards of the optimizer do not fit the devices {self._matrix}"
            )
        return count, index

    @property
    def _matrix(self) -> str:
        return " x ".join(map(str, self.device_matrix))


ENDINGS = (".ckpt", ".json")
FILE = "ckpt_strategy_rank_{}.ckpt"
_OF_RANK = re.compile(r".*_rank_(\d{1,6})\.(?:ckpt|json)")
_OF_STAGE = re.compile(r"(\d{1,6})-(.+)")
_MOST_BYTES = 256 << 20
_MOST_DEVICES = 1 << 20

Layouts = Mapping[str, TensorLayout]  # by a tensor's name


@dataclass(frozen=True)
class Strategy:
    """The layouts of every stage of a pipeline. All stages have as many devices."""

    stages: Sequence[Layouts]
    where: Path

    @property
    def num_devices(self) -> int:
        """Of one stage."""
        return next(layout.num_devices for layouts in self.stages for layout in layouts.values())

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.num_devices * len(self.stages)

    def of_rank(self, rank: int) -> tuple[Layouts, int]:
        """The layouts of a rank's pipeline stage, and the rank's device in the stage."""
        stage, device = divmod(rank, self.num_devices)
        return self.stages[stage], device


def open_strategy(path: Path) -> Strategy:
    """A merged file, that of a single stage, or a folder of ranks' files, which must agree."""
    with files.raising(CheckpointError, f"cannot read {path}"):
        if files.is_folder(path):
            names = [name for name in files.list_folder(path) if name.endswith(ENDINGS)]
            paths = [path / name for name in names]
        else:
            paths = [path]
        if not paths:
            raise CheckpointError(f"{path}: contains no strategy files (*.ckpt or *.json)")
        parsed = {file: _parse(file) for file in paths}
    return _checked(_by_stage(parsed, path), path)


def _parse(file: Path) -> tuple[int, dict[str, TensorLayout]]:
    """The stage of a file, and its layouts."""
    with files.open_file(file) as opened:
        data = files.read_all(opened, _MOST_BYTES)
    return _from_json(data, str(file)) if file.suffix == ".json" else _from_wire(data, str(file))


def _by_stage(
    parsed: Mapping[Path, tuple[int, dict[str, TensorLayout]]], path: Path
) -> dict[int, dict[str, TensorLayout]]:
    """The layouts of each stage; those of its ranks are equal."""
    stages: dict[int, dict[str, TensorLayout]] = {}
    for file, (stage, layouts) in parsed.items():
        rank_match, at = _OF_RANK.fullmatch(file.name), stage
        if rank_match and layouts:  # what it says of its stage may be missing
            at = int(rank_match.group(1)) // next(iter(layouts.values())).num_devices
        merged = {name: _OF_STAGE.fullmatch(name) for name in layouts}
        if layouts and all(merged.values()) and not rank_match:
            for name, match in merged.items():
                assert match is not None
                stages.setdefault(int(match[1]), {})[match[2]] = layouts[name]
            continue
        if stages.setdefault(at, layouts) != layouts:
            raise CheckpointError(
                f"{file}: differs from the files of the same pipeline stage ({at}) in {path}"
            )
    return stages


def _checked(stages: Mapping[int, Layouts], path: Path) -> Strategy:
    if not any(stages.values()):
        raise CheckpointError(f"{path}: it describes no tensors")
    stages_with_tensors = {stage for stage, layouts in stages.items() if layouts}
    if missing := sorted(set(range(max(stages) + 1)) - stages_with_tensors):
        raise CheckpointError(f"{path}: the strategy of pipeline stage {missing[0]} is missing")
    sizes = {layout.num_devices for layouts in stages.values() for layout in layouts.values()}
    if len(sizes) > 1:
        device_counts = " and ".join(map(str, sorted(sizes)[:2]))
        raise CheckpointError(
            f"{path}: tensors are on {device_counts} devices; a stage has one number"
        )
    return Strategy([stages[stage] for stage in sorted(stages)], path)


def _from_wire(data: bytes, where: str) -> tuple[int, dict[str, TensorLayout]]:
    """A ``ParallelStrategyMap``: its items 2 say the stage, its items 3 a tensor's layout."""
    # Field 1, current_stage, is not read: in files of MindSpore 2.10 it counts compilations.
    stage, layouts = 0, {}
    for number, item in wire_fields(data, where):
        if number == 2 and isinstance(item, bytes):
            strategy = _messages(item, where).get(2, [b""])[0]
            stages = _messages(strategy, where).get(1, [0])
            stage = stages[-1] if isinstance(stages[-1], int) else 0
        elif number == 3 and isinstance(item, bytes):
            parts = _messages(item, where)
            name, content = (_bytes(parts.get(n, [b""])[-1], where) for n in (1, 2))
            text = name.decode("utf-8", "replace")
            layouts[text] = _layout_from_wire(content, where, text)
    return stage, layouts


def _messages(data: Value, where: str) -> dict[int, list[Value]]:
    """The values of a message by their number."""
    values: dict[int, list[Value]] = {}
    for number, value in wire_fields(_bytes(data, where), where):
        values.setdefault(number, []).append(value)
    return values


def _bytes(value: Value, where: str) -> bytes:
    if not isinstance(value, bytes):
        raise CheckpointError(f"{where}: not a strategy file of MindSpore")
    return value


def _layout_from_wire(content: bytes, where: str, name: str) -> TensorLayout:
    """A ``ParallelLayouts``: 1 the matrix, 2 tensor maps, 3 and 4 uneven slices, 5 field, 6 and 7
    the optimizer's step and shards."""
    parts = _messages(content, where)
    lists = {
        n: [integers(_messages(value, where).get(1, []), where) for value in parts.get(n, [])]
        for n in (1, 2, 3, 4)
    }
    field, step, shards = ((integers(parts.get(n, [0])[-1:], where) or (0,))[0] for n in (5, 6, 7))
    if field or any(lists[3]) or any(lists[4]):
        raise _uneven(where, name)
    matrix = lists[1][0] if lists[1] else ()
    return _layout(matrix, tuple(lists[2]), (shards, step), f"{where}: {name}")


def _from_json(data: bytes, where: str) -> tuple[int, dict[str, TensorLayout]]:
    content = strict_json.parse_object(data, where)
    items, stages = content.get("parallel_layout_item"), content.get("parallel_strategy_item")
    if not isinstance(items, dict) or not all(isinstance(item, dict) for item in items.values()):
        raise CheckpointError(f"{where}: expected parallel_layout_item with an entry per tensor")
    first: object = next(iter(stages.values()), {}) if isinstance(stages, dict) else {}
    stage = first.get("stage", 0) if isinstance(first, dict) else 0
    return int(stage), {name: _of_json(name, item, where) for name, item in items.items()}


def _of_json(name: str, item: Mapping[str, Any], where: str) -> TensorLayout:
    if item.get("field") or item.get("param_split_shape") or item.get("indices_offset"):
        raise _uneven(where, name)
    where = f"{where}: {name}"
    matrix = _whole_numbers(item.get("dev_matrix"), where)
    tensor_map = _whole_numbers(item.get("tensor_map"), where)
    shards = [item.get(f"opt_weight_shard_{key}", 0) for key in ("size", "step")]
    size, step = _whole_numbers(shards, where)
    return _layout(matrix, (tensor_map,), (size, step), where)


def _whole_numbers(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(n) is int for n in value):
        raise CheckpointError(f"{where}: expected whole numbers, found {str(value)[:60]}")
    return tuple(value)


def _layout(
    matrix: tuple[int, ...], maps: tuple[tuple[int, ...], ...], shards: tuple[int, int], where: str
) -> TensorLayout:
    # A damaged file must not make a world of any size.
    if not matrix or min(matrix) < 1 or prod(matrix) > _MOST_DEVICES:
        raise CheckpointError(f"{where}: {list(matrix)[:8]} is no matrix of devices")
    return TensorLayout(matrix, maps, *shards)


def _uneven(where: str, name: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: {name[:200]!r} has uneven manual slices (param_split_shape), which are not "
        "supported"
    )


def dump_strategy(stage: int, layouts: Layouts) -> bytes:
    """The strategy file of one stage, in the form of MindSpore's own functions."""
    return b"".join(_dumped(stage, layouts))


def _dumped(stage: int, layouts: Layouts) -> Iterator[bytes]:
    yield integer(1, 1)
    for name in sorted(layouts):
        strategies = integer(1, stage)
        yield message(2, message(1, f"Load_{name}".encode()) + message(2, strategies))
    for name in sorted(layouts):
        layout = layouts[name]
        content = message(1, packed(1, layout.device_matrix))
        content += b"".join(message(2, packed(1, dim_map)) for dim_map in layout.tensor_map)
        content += message(3, b"") + message(4, b"")  # MindSpore's reader takes the first of each
        content += integer(5, 0) + integer(6, layout.step) + integer(7, layout.num_shards)
        yield message(3, message(1, name.encode()) + message(2, content))


Tensors = Mapping[str, tuple[str, tuple[int, ...]]]  # name -> dtype, whole shape

_EXAMPLE = "for example data_parallel=2,model_parallel=4,pipeline_stage=2"
_SWITCH = {"true": True, "false": False}
MOMENTS = ("adam_m.", "adam_v.")
_ROWS = re.compile(
    r"(.*\.)?(w[qkv]|w_qkv|w1|w3|w_gate_hidden|linear_(q|k|v|qkv|fc1)|gating|hidden"
    r"|(q|k|v|gate|up)_proj)\.(weight|bias)"
)
_COLUMNS = re.compile(r"(.*\.)?(wo|w2|linear_proj|linear_fc2|o_proj|down_proj)\.weight")
_VOCABULARY = re.compile(
    r"(.*\.)?(tok_embeddings\.embedding_weight|word_embeddings\.weight|embed_tokens\.weight"
    r"|lm_head\.weight|output_layer\.weight)"
)
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d{1,6})\..*")
_LAST = re.compile(
    r"(.*\.)?(norm_out|lm_head|output_layer|final_layernorm|model\.norm)\.(weight|bias)"
)
_UNKNOWN = re.compile(
    r".*\.(experts\..*|shared_experts\..*|ffn\.w[123]\.weight|linear_(q|kv)_(up|down)_proj\..*)"
)


@dataclass(frozen=True)
class ParallelConfig:
    """The settings of MindSpore Transformers that determine a rank's slices, by its names."""

    data_parallel: int = 1
    model_parallel: int = 1
    pipeline_stage: int = 1
    enable_parallel_optimizer: bool = False
    optimizer_weight_shard_size: int = ALL_COPIES
    parallel_optimizer_threshold: int = 64  # KiB; smaller tensors are not sharded
    vocab_emb_dp: bool = True  # what has a row for every token is whole in every rank

    def __post_init__(self) -> None:
        for name in ("data_parallel", "model_parallel", "pipeline_stage"):
            if getattr(self, name) < 1:
                raise CheckpointError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.optimizer_weight_shard_size < 1 and self.optimizer_weight_shard_size != ALL_COPIES:
            raise CheckpointError(
                "optimizer_weight_shard_size must be at least 1, or -1 for all copies, got "
                f"{self.optimizer_weight_shard_size}"
            )

    @classmethod
    def from_text(cls, text: str) -> ParallelConfig:
        """Of ``data_parallel=2,model_parallel=4``. Raises ``CheckpointError`` for anything else."""
        field_types = {field.name: field.type for field in fields(cls)}
        odd, example = f"{{}} is none of {', '.join(field_types)}", _EXAMPLE
        values: dict[str, int] = {}
        for name, value in pairs(
            text, field_types, option="parallel_config", odd=odd, example=example
        ):
            is_switch = field_types[name] == "bool"
            if is_switch and value.lower() in _SWITCH:
                values[name] = _SWITCH[value.lower()]
            elif not is_switch and re.fullmatch(r"-?[0-9]{1,9}", value):
                values[name] = int(value)
            else:
                kind = "true or false" if is_switch else "a whole number"
                raise CheckpointError(
                    f"parallel_config {text!r}: {name} must be {kind}, got {value!r}; {example}"
                )
        return cls(**values)  # type: ignore[arg-type]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.data_parallel * self.model_parallel * self.pipeline_stage

    def stages(self, tensors: Tensors) -> list[Layouts]:
        """The layout of every tensor and its moments, by pipeline stage; sizes must fit."""
        stages: list[dict[str, TensorLayout]] = [{} for _ in range(self.pipeline_stage)]
        last = max((layer for name in tensors if (layer := _layer(name)) is not None), default=-1)
        for name in tensors:
            stages[self._stage(name, last + 1)][name] = self._layout(name, tensors)
        return list(stages)

    def _stage(self, name: str, num_layers: int) -> int:
        if self.pipeline_stage == 1:
            return 0
        if num_layers % self.pipeline_stage or not num_layers:
            raise CheckpointError(
                f"pipeline_stage={self.pipeline_stage}: {counted(num_layers, 'layer')} cannot be "
                "divided evenly; give the strategy files of the training instead"
            )
        layer = _layer(name)
        if layer is not None:
            return layer // (num_layers // self.pipeline_stage)
        return self.pipeline_stage - 1 if _LAST.fullmatch(weight_of(name)) else 0

    def _layout(self, name: str, tensors: Tensors) -> TensorLayout:
        shape, weight = tensors[name][1], weight_of(name)
        dtype = tensors.get(weight, tensors[name])[0]  # moments follow their weight
        if self.model_parallel > 1 and _UNKNOWN.fullmatch(weight):
            raise CheckpointError(
                f"model_parallel={self.model_parallel}: the sharding of {name[:200]!r} is not "
                "known; let the training write its strategy files, and use these instead"
            )
        dims = dict.fromkeys(self._cut_dims(weight, shape), self.model_parallel)
        for dim, count in dims.items():
            if shape[dim] % count:
                raise CheckpointError(
                    f"model_parallel={count}: {name[:200]!r} has {shape[dim]} "
                    f"{'rows' if dim == 0 else 'columns'}, which is no multiple of it"
                )
        matrix, axes = self._matrix()
        cut = tuple(axes["mp"] if dim in dims and "mp" in axes else -1 for dim in range(len(shape)))
        plain = TensorLayout(matrix, (cut,))
        if not self.enable_parallel_optimizer or not shape:
            return plain
        if num_bytes(dtype, shape) < self.parallel_optimizer_threshold * 1024:
            return plain
        return _sharded(plain, shape, self.optimizer_weight_shard_size)

    def _cut_dims(self, weight: str, shape: tuple[int, ...]) -> Iterator[int]:
        if _VOCABULARY.fullmatch(weight):
            if not self.vocab_emb_dp and shape[0] % self.model_parallel == 0:
                yield 0
        elif shape and _ROWS.fullmatch(weight):
            yield 0
        elif len(shape) == 2 and _COLUMNS.fullmatch(weight):
            yield 1

    def _matrix(self) -> tuple[tuple[int, ...], dict[str, int]]:
        """The devices of a stage, without axes of one, and the axes counted from the right."""
        sizes = {"dp": self.data_parallel, "mp": self.model_parallel}
        left = {axis: size for axis, size in sizes.items() if size > 1}
        axes = {axis: len(left) - 1 - i for i, axis in enumerate(left)}
        return tuple(left.values()) or (1,), axes


def _layer(name: str) -> int | None:
    match = _LAYER.fullmatch(name)
    return int(match[1]) if match else None


def weight_of(name: str) -> str:
    """The name of the weight that a moment belongs to; a weight's own."""
    for prefix in MOMENTS:
        name = name.removeprefix(prefix)
    return name


def _sharded(plain: TensorLayout, shape: tuple[int, ...], size: int) -> TensorLayout:
    """``plain`` sharded over its replicas by the optimizer; unchanged if that is not even."""
    used = {axis for dim_axes in plain.axes(len(shape)) for axis in dim_axes}
    free = [a for a, n in enumerate(plain.device_matrix) if a not in used and n > 1]
    copies = prod(plain.device_matrix[axis] for axis in free)
    count = copies if size == ALL_COPIES else size
    rows = shape[0] // plain.counts(len(shape))[0]
    if not free or count == 1 or rows % count:
        return plain
    step = prod(plain.device_matrix[free[-1] + 1 :])
    sharded = TensorLayout(plain.device_matrix, plain.tensor_map, size, step)
    try:
        sharded.counts(len(shape))
    except CheckpointError as error:
        raise CheckpointError(f"optimizer_weight_shard_size={size}: {error}") from None
    return sharded
