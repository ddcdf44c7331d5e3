"""Write a GGUF file: its head by the ``gguf`` package, then tensor after tensor, in blocks.

The file, and others beside it, are made in a temporary folder and renamed, so that a killed or
failed export leaves nothing under the names asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    GGML_QUANT_VERSION,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFWriter,
)
from gguf.quants import quantize

from ...checkpoint.disk.bytes import ByteStream
from ...checkpoint.disk.commit import claim, clean_leftovers
from ...checkpoint.sources.copying import Progress
from ...checkpoint.sources.source import TensorSource
from ...errors import CheckpointError, ModelError
from ...storage import files
from ...storage.parallel_work import ahead
from .k_quants import Bytes, Floats, q4_k, q5_k, q6_k
from .tensors import FileTensor

_LIMIT = 1 << 30  # bytes of a head, which the vocabulary fills


@dataclass(frozen=True)
class GGUFContents:
    """What is written."""

    architecture: str
    tensors: Mapping[str, FileTensor]
    types: Mapping[str, GGMLQuantizationType]
    describe: Callable[[GGUFWriter], None]
    """Adds the settings."""

    def size(self) -> int:
        """The bytes of all tensors."""
        return sum(num_bytes(t.shape, self.types[name]) for name, t in self.tensors.items())


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
        with claim(target, files.open_folder) as held:
            folder = held.path
            try:
                _write(folder, target.name, contents, source, progress)
                for path, data in beside.items():
                    files.write_new(folder / path.name, data)
                refuse_existing(target, *beside)
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
        file.reserve(_aligned(len(head)) + sum(_aligned(n) for n in _sizes(contents)))
        file.bypass_cache()
        with ByteStream(file) as stream:
            stream.write(_padded(head))
            for tensor, size in zip(contents.tensors.values(), _sizes(contents), strict=True):
                for data in _packed(tensor, contents.types[tensor.name], source):
                    stream.write(data)
                    progress(len(data))
                stream.write(bytes(_aligned(size) - size))


def _packed(
    tensor: FileTensor, kind: GGMLQuantizationType, source: TensorSource
) -> Iterator[bytes]:
    """The bytes of a tensor; the next rows are read and packed while some are written."""
    reads = tensor.chunks(source)

    def packed(read: Callable[[], Floats]) -> bytes:
        return pack(read(), kind, tensor.name)

    yield from ahead(packed, reads)


def _head(path: Path, contents: GGUFContents) -> bytes:
    """The bytes before the first tensor."""
    writer = GGUFWriter(path, contents.architecture)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    contents.describe(writer)
    for name, tensor in contents.tensors.items():
        kind = contents.types[name]
        size = num_bytes(tensor.shape, kind)
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with files.open_file(path) as file:
        return files.read_all(file, _LIMIT)


def _sizes(contents: GGUFContents) -> list[int]:
    return [num_bytes(t.shape, contents.types[name]) for name, t in contents.tensors.items()]


def _aligned(size: int) -> int:
    return -(-size // GGUF_DEFAULT_ALIGNMENT) * GGUF_DEFAULT_ALIGNMENT


def _padded(data: bytes) -> bytes:
    return data + bytes(_aligned(len(data)) - len(data))


T = GGMLQuantizationType
_K_QUANTS: Mapping[T, Callable[[Floats], Bytes]] = {T.Q4_K: q4_k, T.Q5_K: q5_k, T.Q6_K: q6_k}
_CHUNK = 1 << 16  # weights whose intermediate values stay in the cache


def num_bytes(shape: tuple[int, ...], kind: T) -> int:
    """The bytes of a tensor of ``shape``."""
    block, size = GGML_QUANT_SIZES[kind]
    return int(np.prod(shape, dtype=np.int64)) // block * size


def pack(values: Floats, kind: T, name: str) -> bytes:
    """``values``, whole rows, as ``kind``. Raises ``CheckpointError`` for what it cannot hold."""
    if not np.isfinite(values).all():
        raise CheckpointError(f"{name}: it contains NaN or infinite values; nothing was written")
    if kind in _K_QUANTS:
        flat = values.reshape(-1)
        parts = [flat[i : i + _CHUNK] for i in range(0, len(flat), _CHUNK)]
        return b"".join(_K_QUANTS[kind](part).tobytes() for part in parts)
    with np.errstate(over="ignore"):
        packed = quantize(values, kind)
    if kind == T.F16 and not np.isfinite(packed).all():
        raise CheckpointError(f"{name}: its values exceed float16; use --quantize bf16 or f32")
    return packed.tobytes()
