"""Which tensors a GGUF file holds, and which boxes of a tensor source each is made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map
from transformers import PretrainedConfig

from ...checkpoint.sources.source import Shape, TensorSource
from ...errors import CheckpointError
from ...parallel.box import Box
from .architectures import GGUFArchitecture, head_dim
from .k_quants import Floats
from .settings import rope_tensors

_CHUNK = 1 << 21  # weights read at a time
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(\w+_proj)\.weight")
_FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
_COMPUTED = (".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")
_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class FileTensor:
    """One tensor of the file: boxes of the source, one below the other."""

    name: str
    shape: Shape
    pieces: tuple[tuple[str, Box], ...] = ()
    head_rows: int = 0  # rows of a head, whose rotary pairs become adjacent
    shift: float = 0.0
    values: Floats | None = field(default=None, compare=False)  # computed, not of the source

    def chunks(self, source: TensorSource) -> Iterator[Callable[[], Floats]]:
        """Reads of the values in float32, some rows at a time."""
        if (values := self.values) is not None:
            yield lambda: values
            return
        for name, box in self.pieces:
            for part in self._parts(box):
                yield partial(self._changed, source, name, part)

    def _parts(self, box: Box) -> Iterator[Box]:
        """Whole rows, and whole heads where their rows change places."""
        columns = self.shape[-1]
        rows = max(1, _CHUNK // columns)
        if self.head_rows:
            rows = max(1, rows // self.head_rows) * self.head_rows
        yield from box.blocks(rows * columns)

    def _changed(self, source: TensorSource, name: str, box: Box) -> Floats:
        found: Floats = source.read(name, box).float().numpy()
        found = found.reshape(-1, found.shape[-1]) if found.ndim > 1 else found
        if self.head_rows:
            pairs = found.reshape(-1, 2, self.head_rows // 2, *found.shape[1:])
            found = pairs.swapaxes(1, 2).reshape(found.shape)
        return found + np.float32(self.shift) if self.shift else np.ascontiguousarray(found)


def file_tensors(
    shapes: Mapping[str, Shape], config: PretrainedConfig, row: GGUFArchitecture, where: str
) -> dict[str, FileTensor]:
    """The tensors of the file for a model with tensors of these ``shapes``. Raises
    ``CheckpointError`` if one has no place in it."""
    names = name_map(config, row)
    pieces: dict[str, list[tuple[int, str, Box]]] = {}
    for name, shape in shapes.items():
        is_tied_head = name == _HEAD and config.tie_word_embeddings
        if is_tied_head or name.endswith(_COMPUTED):
            continue
        for number, generic, box in _parts(name, shape):
            found = gguf_name(generic, names, row, f"{where}: {name}")
            pieces.setdefault(found, []).append((number, name, box))
    made = {name: _joined(name, sorted(own), config, row) for name, own in pieces.items()}
    computed = rope_tensors(config)
    made |= {name: FileTensor(name, v.shape, values=v) for name, v in computed.items()}
    return dict(sorted(made.items(), key=lambda item: _order(item[0])))


def check_complete(
    found: Mapping[str, FileTensor], wanted: Mapping[str, FileTensor], where: str
) -> None:
    """Raise ``CheckpointError`` unless the tensors are those of the model, in their shapes."""
    for name, tensor in wanted.items():
        if name not in found:
            made_of = ", ".join(sorted({piece for piece, _ in tensor.pieces})[:2])
            raise CheckpointError(f"{where}: has no {made_of}, which the model needs")
        if found[name].shape != tensor.shape:
            raise CheckpointError(
                f"{where}: {found[name].pieces[0][0]} has shape {found[name].shape}, expected "
                f"{tensor.shape}"
            )
    if extra := sorted(found.keys() - wanted.keys()):
        raise CheckpointError(
            f"{where}: {found[extra[0]].pieces[0][0]} is not of the model that config.json names"
        )


def name_map(config: PretrainedConfig, row: GGUFArchitecture) -> TensorNameMap:
    """gguf's own table of names for this architecture."""
    arch = next(a for a in MODEL_ARCH if MODEL_ARCH_NAMES.get(a) == row.name)
    return get_tensor_name_map(arch, config.num_hidden_layers)


def gguf_name(name: str, names: TensorNameMap, row: GGUFArchitecture, where: str) -> str:
    """The name in the file. Raises ``CheckpointError`` if llama.cpp knows no such tensor."""
    found: str | None = names.get_name(name, try_suffixes=(".weight", ".bias"))
    module, _, kind = name.rpartition(".")
    is_bias = kind == "bias" and not module.endswith(row.biased or ("no module",))
    if found is None or is_bias:
        raise CheckpointError(f"{where} has no place in a GGUF file of architecture {row.name}")
    return found


def head_rows(name: str, config: PretrainedConfig, row: GGUFArchitecture) -> int:
    """The rows of a head, if those of the tensor ``name`` of the file change places."""
    is_rotated = ".attn_q." in name or ".attn_k." in name
    return head_dim(config) if row.is_permuted and is_rotated else 0


def _parts(name: str, shape: Shape) -> Iterator[tuple[int, str, Box]]:
    """The number of the expert, the name without it, and the box of each part of a tensor."""
    if one := _EXPERT.fullmatch(name):
        yield int(one[2]), f"{one[1]}.{one[3]}.weight", Box.whole(shape)
        return
    fused = _FUSED.fullmatch(name)
    if fused is None:
        yield 0, name, Box.whole(shape)
        return
    experts, rows, columns = shape
    parts = ["gate_proj", "up_proj"] if fused[2] == "gate_up_proj" else ["down_proj"]
    height = rows // len(parts)
    for place, part in enumerate(parts):
        for expert in range(experts):
            box = Box((expert, place * height, 0), (1, height, columns))
            yield expert, f"{fused[1]}.{part}.weight", box


def _joined(
    name: str, parts: list[tuple[int, str, Box]], config: PretrainedConfig, row: GGUFArchitecture
) -> FileTensor:
    """Several experts are one tensor, with the expert as its first dimension."""
    shape = parts[0][2].shape
    if "_exps." in name:
        shape = (len(parts), *shape[-2:])
    shift = row.norm_shift if name.endswith("norm.weight") else 0.0
    pieces = tuple((own, box) for _, own, box in parts)
    return FileTensor(name, shape, pieces, head_rows(name, config, row), shift)


def _order(name: str) -> tuple[int, str]:
    """The embeddings, the layers, the rest."""
    layer = re.match(r"blk\.(\d+)\.", name)
    if layer is not None:
        return int(layer[1]) + 1, name
    return (0 if name.startswith(("token_embd", "rope")) else 1 << 30), name
