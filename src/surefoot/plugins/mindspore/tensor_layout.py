"""How every tensor of a pipeline stage is sliced over its devices, in MindSpore's terms: the layout
of one tensor, and the layouts that MindSpore Transformers chooses for a ``parallel_config``.

The devices of a stage form a matrix. A tensor's dimension is sharded along some axes of it, into
equal parts. An axis that shards no dimension contains replicas. The optimizer may shard dimension 0
of these again (optimizer parallelism), so that no two devices have the same slice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import prod

from ...checkpoint.disk.tensorfile import num_bytes
from ...errors import CheckpointError, counted
from ...parallel.sharding import Box
from ...schema.named_values import pairs

ALL_COPIES = -1  # as a number of shards: over all devices that hold copies
_NOT_SHARDED = -1  # in a tensor map: no axis shards this dimension


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

    def box(self, shape: tuple[int, ...], device: int) -> Box:
        """The slice of a full tensor on one device of the stage; parts must be equal."""
        start, extent = [], []
        for length, (count, index) in zip(shape, self._shards(len(shape), device), strict=True):
            if length % count:
                raise CheckpointError(f"a dimension of {length} is not {count} equal parts")
            start.append(index * (length // count))
            extent.append(length // count)
        return Box(tuple(start), tuple(extent))

    def whole(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """The full shape of the tensor of which each device has a ``part``."""
        return tuple(n * count for n, count in zip(part, self.counts(len(part)), strict=True))

    def counts(self, num_dims: int) -> tuple[int, ...]:
        """The number of parts of each dimension."""
        return tuple(count for count, _ in self._shards(num_dims, device=0))

    def _shards(self, num_dims: int, device: int) -> list[tuple[int, int]]:
        """For each dimension, the number of its parts and the index of the device's part."""
        axes, coordinate = self.axes(num_dims), self._coordinate(device)
        shards = []
        for dim_axes in axes:
            count, index = 1, 0
            for axis in dim_axes:
                size = self.device_matrix[axis]
                count, index = count * size, index * size + coordinate[axis]
            shards.append((count, index))
        if self.num_shards and shards:  # the optimizer shards each part of dimension 0 again
            (count, index), used_axes = shards[0], {axis for dim_axes in axes for axis in dim_axes}
            num_shards, shard = self._optimizer_shard(coordinate, used_axes)
            shards[0] = count * num_shards, index * num_shards + shard
        return shards

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
        axes = tuple(tuple(last - n for n in dim_map if n != _NOT_SHARDED) for dim_map in maps)
        used_axes = [axis for dim_axes in axes for axis in dim_axes]
        is_within = all(0 <= axis <= last for axis in used_axes)
        if len(set(used_axes)) < len(used_axes) or not is_within:
            raise CheckpointError(f"tensor map {maps} does not fit the devices {self._matrix}")
        return axes

    def _coordinate(self, device: int) -> list[int]:
        """The position of a device along every axis, the last one fastest."""
        coordinate = []
        for size in reversed(self.device_matrix):
            device, position = divmod(device, size)
            coordinate.append(position)
        return coordinate[::-1]

    def _optimizer_shard(self, coordinate: list[int], used_axes: set[int]) -> tuple[int, int]:
        """The number of the optimizer's shards and the index of the device's one: over axes of
        replicas, from the right, until there are enough."""
        replica_axes = [axis for axis in range(len(coordinate)) if axis not in used_axes]
        num_replicas = prod(self.device_matrix[axis] for axis in replica_axes)
        num_shards = num_replicas if self.num_shards == ALL_COPIES else self.num_shards
        remaining, index, stride = num_shards, 0, 1
        for axis in reversed(replica_axes):
            size = min(self.device_matrix[axis], remaining)
            if remaining % size or self.device_matrix[axis] % size:
                break
            index += coordinate[axis] % size * stride
            stride, remaining = stride * size, remaining // size
        if remaining != 1 or num_shards < 1:
            raise CheckpointError(
                f"{self.num_shards} shards of the optimizer do not fit the devices {self._matrix}"
            )
        return num_shards, index

    @property
    def _matrix(self) -> str:
        return " x ".join(map(str, self.device_matrix))


Layouts = Mapping[str, TensorLayout]  # by a tensor's name
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]  # name -> dtype, full shape

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
    vocab_emb_dp: bool | None = None  # False: what has a row for every token is sharded, too

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
            is_switch = "bool" in str(field_types[name])
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
        """The layout of every tensor and its moments, by pipeline stage; sizes must fit. Weights of
        projections are sharded as in Megatron: queries, keys, values and the up-projections by
        rows, the down-projections by columns; embedding and head only without ``vocab_emb_dp``.
        """
        stages: list[dict[str, TensorLayout]] = [{} for _ in range(self.pipeline_stage)]
        layers = [layer for name in tensors if (layer := _layer(name)) is not None]
        num_layers = max(layers, default=-1) + 1
        for name in tensors:
            layout = self._layout(name, tensors)
            stages[self._stage(name, num_layers)][name] = layout
        return list(stages)

    def _stage(self, name: str, num_layers: int) -> int:
        """Equal numbers of layers in each stage, the embedding in the first, the head in the
        last."""
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
        """On a matrix of data parallel by model parallel devices, without axes of one."""
        shape, weight = tensors[name][1], weight_of(name)
        sharded_dim = self._sharded_dim(name, shape) if self.model_parallel > 1 else None
        matrix = tuple(n for n in (self.data_parallel, self.model_parallel) if n > 1) or (1,)
        # Model parallelism is the last axis: 0, as a tensor map counts axes from the right.
        dim_axes = tuple(0 if dim == sharded_dim else _NOT_SHARDED for dim in range(len(shape)))
        layout = TensorLayout(matrix, (dim_axes,))
        if not self.enable_parallel_optimizer or not shape:
            return layout
        dtype = tensors.get(weight, tensors[name])[0]  # moments follow their weight
        if num_bytes(dtype, shape) < self.parallel_optimizer_threshold * 1024:
            return layout
        return self._with_optimizer_shards(layout, shape)

    def _sharded_dim(self, name: str, shape: tuple[int, ...]) -> int | None:
        """The dimension that model parallelism shards."""
        weight, count = weight_of(name), self.model_parallel
        if _UNKNOWN.fullmatch(weight):
            raise CheckpointError(
                f"model_parallel={count}: the sharding of {name[:200]!r} is not "
                "known; let the training write its strategy files, and use these instead"
            )
        if _VOCABULARY.fullmatch(weight):
            return 0 if self.vocab_emb_dp is False and not shape[0] % count else None
        if shape and _ROWS.fullmatch(weight):
            dim, parts = 0, "rows"
        elif len(shape) == 2 and _COLUMNS.fullmatch(weight):
            dim, parts = 1, "columns"
        else:
            return None
        if shape[dim] % count:
            raise CheckpointError(
                f"model_parallel={count}: {name[:200]!r} has {shape[dim]} {parts}, which is no "
                "multiple of it"
            )
        return dim

    def _with_optimizer_shards(self, layout: TensorLayout, shape: tuple[int, ...]) -> TensorLayout:
        """``layout`` sharded over its replicas by the optimizer; unchanged if that is not even."""
        matrix, size = layout.device_matrix, self.optimizer_weight_shard_size
        used_axes = {axis for dim_axes in layout.axes(len(shape)) for axis in dim_axes}
        replica_axes = [a for a, n in enumerate(matrix) if a not in used_axes and n > 1]
        num_replicas = prod(matrix[axis] for axis in replica_axes)
        num_shards = num_replicas if size == ALL_COPIES else size
        num_rows = shape[0] // layout.counts(len(shape))[0]
        if not replica_axes or num_shards == 1 or num_rows % num_shards:
            return layout
        step = prod(matrix[replica_axes[-1] + 1 :])
        sharded = replace(layout, num_shards=size, step=step)
        try:
            sharded.counts(len(shape))
        except CheckpointError as error:
            raise CheckpointError(f"optimizer_weight_shard_size={size}: {error}") from None
        return sharded


def has_row_per_token(name: str) -> bool:
    """Whether it is the weight, or a moment, of an embedding or a head."""
    return _VOCABULARY.fullmatch(weight_of(name)) is not None


def _layer(name: str) -> int | None:
    match = _LAYER.fullmatch(name)
    return int(match[1]) if match else None


def weight_of(name: str) -> str:
    """The name of the weight that a moment belongs to; a weight's own."""
    for prefix in MOMENTS:
        name = name.removeprefix(prefix)
    return name
