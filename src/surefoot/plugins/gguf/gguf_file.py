"""Write a GGUF file: its head by the ``gguf`` package, then tensor after tensor, in blocks.

The file, and others beside it, are made in a temporary folder and renamed, so that a killed or
failed export leaves nothing under the names asked for.

Which tensors a GGUF file holds, and which boxes of a tensor source each is made of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    GGML_QUANT_VERSION,
    GGUF_DEFAULT_ALIGNMENT,
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGUFWriter,
    TensorNameMap,
    get_tensor_name_map,
)
from gguf.quants import quantize
from transformers import PretrainedConfig

from ...checkpoint.disk.commit import claim, clean_leftovers
from ...checkpoint.sources import Progress, Shape, TensorSource
from ...errors import CheckpointError, ModelError
from ...parallel.sharding import Box
from ...storage import files
from ...storage.parallel_work import ByteStream, ahead
from .architectures import GGUFArchitecture, head_dim, rope_tensors
from .formats import Bytes, Floats, T, q4_k, q5_k, q6_k

_MOST_READ = 1 << 21  # weights read at a time
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
        rows = max(1, _MOST_READ // columns)
        if self.head_rows:
            rows = max(1, rows // self.head_rows) * self.head_rows
        yield from box.blocks(rows * columns)

    def _changed(self, source: TensorSource, name: str, box: Box) -> Floats:
        values: Floats = source.read(name, box).float().numpy()
        # The box of one expert has three dimensions, of which the first is 1.
        values = values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values
        if self.head_rows:
            # transformers rotates row i with row i + half,
            # llama.cpp's llama row 2i with row 2i + 1.
            pairs = values.reshape(-1, 2, self.head_rows // 2, *values.shape[1:])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        return values + np.float32(self.shift) if self.shift else np.ascontiguousarray(values)


def file_tensors(
    shapes: Mapping[str, Shape], config: PretrainedConfig, row: GGUFArchitecture, where: str
) -> dict[str, FileTensor]:
    """The tensors of the file for a model with tensors of these ``shapes``. Raises
    ``CheckpointError`` if one has no place in it."""
    names = name_map(config, row)
    pieces: dict[str, list[tuple[int, str, Box]]] = {}
    for name, shape in shapes.items():
        is_tied_head = name == _HEAD and config.tie_word_embeddings
        # llama.cpp multiplies by token_embd where there is no
        # output.weight, and computes the buffers.
        if is_tied_head or name.endswith(_COMPUTED):
            continue
        for number, generic, box in _parts(name, shape):
            name_in_file = gguf_name(generic, names, row, f"{where}: {name}")
            pieces.setdefault(name_in_file, []).append((number, name, box))
    tensors = {name: _joined(name, sorted(parts), config, row) for name, parts in pieces.items()}
    computed = rope_tensors(config)
    tensors |= {name: FileTensor(name, v.shape, values=v) for name, v in computed.items()}
    return dict(sorted(tensors.items(), key=lambda item: _order(item[0])))


def check_complete(
    tensors: Mapping[str, FileTensor], expected: Mapping[str, FileTensor], where: str
) -> None:
    """Raise ``CheckpointError`` unless the tensors are those of the model, in their shapes."""
    for name, tensor in expected.items():
        if name not in tensors:
            made_of = ", ".join(sorted({piece for piece, _ in tensor.pieces})[:2])
            raise CheckpointError(f"{where}: has no {made_of}, which the model needs")
        if tensors[name].shape != tensor.shape:
            raise CheckpointError(
                f"{where}: {tensors[name].pieces[0][0]} has shape {tensors[name].shape}, expected "
                f"{tensor.shape}"
            )
    if extra := sorted(tensors.keys() - expected.keys()):
        raise CheckpointError(
            f"{where}: {tensors[extra[0]].pieces[0][0]} is not of the model that config.json names"
        )


def name_map(config: PretrainedConfig, row: GGUFArchitecture) -> TensorNameMap:
    """gguf's own table of names for this architecture."""
    arch = next(a for a in MODEL_ARCH if MODEL_ARCH_NAMES.get(a) == row.name)
    return get_tensor_name_map(arch, config.num_hidden_layers)


def gguf_name(name: str, names: TensorNameMap, row: GGUFArchitecture, where: str) -> str:
    """The name in the file. Raises ``CheckpointError`` if llama.cpp knows no such tensor."""
    name_in_file: str | None = names.get_name(name, try_suffixes=(".weight", ".bias"))
    module, _, kind = name.rpartition(".")
    # The package has a name for a bias of any module; llama.cpp's
    # graph reads only those of the row.
    is_bias = kind == "bias" and not module.endswith(row.biased or ("no module",))
    if name_in_file is None or is_bias:
        raise CheckpointError(f"{where} has no place in a GGUF file of architecture {row.name}")
    return name_in_file


def head_rows(name: str, config: PretrainedConfig, row: GGUFArchitecture) -> int:
    """The rows of a head, if those of the tensor ``name`` of the file change places."""
    is_rotated = ".attn_q." in name or ".attn_k." in name
    return head_dim(config) if row.is_permuted and is_rotated else 0


def _parts(name: str, shape: Shape) -> Iterator[tuple[int, str, Box]]:
    """The number of the expert, the name without it, and the box of each part of a tensor."""
    if match := _EXPERT.fullmatch(name):
        yield int(match[2]), f"{match[1]}.{match[3]}.weight", Box.whole(shape)
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
    pieces = tuple((source_name, box) for _, source_name, box in parts)
    return FileTensor(name, shape, pieces, head_rows(name, config, row), shift)


def _order(name: str) -> tuple[int, str]:
    """The embeddings, the layers, the rest."""
    layer = re.match(r"blk\.(\d+)\.", name)
    if layer is not None:
        return int(layer[1]) + 1, name
    return (0 if name.startswith(("token_embd", "rope")) else 1 << 30), name


_LIMIT = 1 << 30  # bytes of a head, which the vocabulary fills


@dataclass(frozen=True)
class GGUFContents:
    """What is written."""

    architecture: str
    tensors: Mapping[str, FileTensor]
    types: Mapping[str, T]
    describe: Callable[[GGUFWriter], None]
    """Adds the settings."""

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each tensor."""
        return {name: num_bytes(t.shape, self.types[name]) for name, t in self.tensors.items()}


def refuse_existing(*targets: Path) -> None:
    """Raise ``ModelError`` if a name is taken."""
    for target in targets:
        if files.exists(target):
            raise ModelError(f"{target}: it exists already, and nothing is overwritten")


def write_files(
    target: Path,
    contents: GGUFContents,
    source: TensorSource,
    beside: Mapping[Path, bytes],
    progress: Progress,
) -> None:
    """Write ``target`` and the small files ``beside`` it. Raises ``CheckpointError``: a disk that
    is full or fails, or values that the format cannot hold."""
    with files.raising(CheckpointError, f"cannot write {target}"):
        files.make_folder(target.parent)
        clean_leftovers(target)
        with claim(target, files.open_folder) as claimed:
            folder = claimed.path
            try:
                _write(folder, target.name, contents, source, progress)
                for path, data in beside.items():
                    files.write_new(folder / path.name, data)
                # Again: writing may take minutes, and a rename would replace what came meanwhile.
                refuse_existing(target, *beside)
                # The weights last: where they are, the others are.
                for path in (*beside, target):
                    files.rename(folder / path.name, path)
                files.sync_folder(target.parent)
            finally:
                files.remove_tree(folder)


def _write(
    folder: Path, name: str, contents: GGUFContents, source: TensorSource, progress: Progress
) -> None:
    head = _head(folder / "head", contents)
    with files.create(folder / name) as file:
        file.reserve(sum(map(_aligned, [len(head), *contents.sizes.values()])))
        file.bypass_cache()
        with ByteStream(file) as stream:
            stream.write(head + bytes(_aligned(len(head)) - len(head)))
            for key, size in contents.sizes.items():
                pack_next = partial(_pack_read, contents.types[key], key)
                # the next rows are read and packed while some are written
                for data in ahead(pack_next, contents.tensors[key].chunks(source)):
                    stream.write(data)
                    progress(len(data))
                # The offsets in the head say that each tensor begins
                # at a multiple of the alignment.
                stream.write(bytes(_aligned(size) - size))


def _pack_read(kind: T, name: str, read: Callable[[], Floats]) -> bytes:
    return pack(read(), kind, name)


def _head(path: Path, contents: GGUFContents) -> bytes:
    """The bytes before the first tensor."""
    writer = GGUFWriter(path, contents.architecture)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    contents.describe(writer)
    for name, size in contents.sizes.items():
        shape, kind = contents.tensors[name].shape, contents.types[name]
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kind)
    # The head only: the package would write the tensors from memory, or from a second file.
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with files.open_file(path) as file:
        return files.read_all(file, _LIMIT)


def _aligned(size: int) -> int:
    return -(-size // GGUF_DEFAULT_ALIGNMENT) * GGUF_DEFAULT_ALIGNMENT


_K_QUANTS: Mapping[T, Callable[[Floats], Bytes]] = {T.Q4_K: q4_k, T.Q5_K: q5_k, T.Q6_K: q6_k}
_BEYOND_FLOAT16 = 65520.0  # where rounding to nearest gives infinity
_MOST_PACKED = 1 << 16  # weights whose intermediate values stay in the cache


def num_bytes(shape: tuple[int, ...], kind: T) -> int:
    """The bytes of a tensor of ``shape``."""
    block, size = GGML_QUANT_SIZES[kind]
    return int(np.prod(shape, dtype=np.int64)) // block * size


def pack(values: Floats, kind: T, name: str) -> bytes:
    """``values``, whole rows, as ``kind``. Raises ``CheckpointError`` for what it cannot hold."""
    # In a K-quant NaN would become some finite number, and nobody would see the damage.
    if not np.isfinite(values).all():
        raise CheckpointError(f"{name}: it contains NaN or infinite values; nothing was written")
    # Also the scale of a block of 4 or 8 bits is a float16, and may be as large as the values.
    if kind not in (T.F32, T.BF16) and np.abs(values).max(initial=0) >= _BEYOND_FLOAT16:
        raise CheckpointError(f"{name}: its values exceed float16; use --quantize bf16 or f32")
    if kind in _K_QUANTS:
        flat = values.reshape(-1)
        parts = [flat[i : i + _MOST_PACKED] for i in range(0, len(flat), _MOST_PACKED)]
        return b"".join(_K_QUANTS[kind](part).tobytes() for part in parts)
    return bytes(quantize(values, kind).tobytes())
