"""The layout of a model on devices in MindSpore Transformers, for a ``parallel_config``. Pure.

Weights of projections are sharded as in Megatron: queries, keys, values and the up-projections by
rows, the down-projections by columns; embedding and head only without ``vocab_emb_dp``. Pipeline
stages have equal numbers of layers, and the optimizer's shards follow the remaining replicas.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import prod

from ...checkpoint.disk.tensorfile import num_bytes
from ...errors import CheckpointError, counted
from ...schema.named_values import pairs
from .strategy import ALL_COPIES, Layouts, TensorLayout

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
        known = {field.name: field.type for field in fields(cls)}
        odd, example = f"{{}} is none of {', '.join(known)}", _EXAMPLE
        found: dict[str, int] = {}
        for name, value in pairs(text, known, option="parallel_config", odd=odd, example=example):
            is_switch = known[name] == "bool"
            if is_switch and value.lower() in _SWITCH:
                found[name] = _SWITCH[value.lower()]
            elif not is_switch and re.fullmatch(r"-?[0-9]{1,9}", value):
                found[name] = int(value)
            else:
                kind = "true or false" if is_switch else "a whole number"
                raise CheckpointError(
                    f"parallel_config {text!r}: {name} must be {kind}, got {value!r}; {example}"
                )
        return cls(**found)  # type: ignore[arg-type]

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
    found = _LAYER.fullmatch(name)
    return int(found[1]) if found else None


def weight_of(name: str) -> str:
    """The name of the weight that a moment belongs to; a weight's own."""
    for prefix in MOMENTS:
        name = name.removeprefix(prefix)
    return name


def _sharded(plain: TensorLayout, shape: tuple[int, ...], size: int) -> TensorLayout:
    """``plain`` sharded over its replicas by the optimizer; unchanged if that is not even."""
    used = {axis for own in plain.axes(len(shape)) for axis in own}
    free = [a for a, n in enumerate(plain.device_matrix) if a not in used and n > 1]
    copies = prod(plain.device_matrix[axis] for axis in free)
    count = copies if size == ALL_COPIES else size
    rows = shape[0] // plain.counts(len(shape))[0]
    if not free or count == 1 or rows % count:
        return plain
    step = prod(plain.device_matrix[free[-1] + 1 :])
    found = TensorLayout(plain.device_matrix, plain.tensor_map, size, step)
    try:
        found.counts(len(shape))
    except CheckpointError as error:
        raise CheckpointError(f"optimizer_weight_shard_size={size}: {error}") from None
    return found
