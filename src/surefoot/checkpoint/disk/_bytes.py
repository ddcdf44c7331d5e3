"""Tensors to bytes at file positions and back, by positional reads and writes.

Writing: space is reserved, then every tensor is written directly from its memory to its final
position, and hashed block by block while the block is in the CPU cache. Reading: a box is read
directly from the file into its tensor. Neither needs more memory than one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import add

import torch

from ...errors import CheckpointError
from ...parallel.progress import wait_for_ranks
from ...parallel.sharding import Box
from ...storage import files
from ...storage.parallel_work import ByteStream
from .manifest import Pieces
from .tensorfile import FilePlan, TensorEntry, TensorFile, ranges_of

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def describe(name: str, tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """The tensor's stored type and shape; a ``CheckpointError`` if it cannot be stored as it is."""
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        kind = "a meta tensor" if tensor.device.type == "meta" else f"a {tensor.layout} tensor"
        raise CheckpointError(f"{name}: cannot store {kind}; only dense tensors with values")
    # A subclass keeps its values elsewhere: a DTensor on all ranks, a
    # quantized one in codes and scales.
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise CheckpointError(f"{name}: cannot store a {type(tensor).__name__}; only plain tensors")
    return dtype_name(name, tensor.dtype), tuple(tensor.shape)


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """The safetensors name of ``dtype``; a ``CheckpointError`` if there is none."""
    if dtype not in NAMES:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in NAMES)
        raise CheckpointError(f"{name}: cannot store {dtype}; safetensors has {supported}")
    return NAMES[dtype]


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, in place."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # one element may have any stride
    # As bytes: numpy has neither bfloat16 nor 8-bit floats.
    return flat.view(torch.uint8).numpy().data


def write_file(
    file: files.File, plan: FilePlan, tensors: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """Write and flush the file that ``plan`` describes; the hash of each tensor's bytes by name."""
    with ByteStream(file) as stream:
        stream.write(plan.head)
        return {name: write_tensor(stream, tensors[name]) for name in plan.header.entries}


def write_box(file: files.File, entry: TensorEntry, box: Box, tensor: torch.Tensor) -> str:
    """Write ``box`` of a stored tensor, block by block, to its position; the hash of its values."""
    digest = files.Hash()
    for part in Box.whole(box.shape).blocks(files.BLOCK // tensor.element_size()):
        block = raw(_dense(tensor[part.slices_in(Box.whole(box.shape))]))
        digest.update(block)
        start = tuple(map(add, box.start, part.start))
        file.write_ranges(ranges_of(entry, Box(start, part.shape)), block)
    return digest.hexdigest()


def write_tensor(
    stream: ByteStream | None, tensor: torch.Tensor, digest: files.Hash | None = None
) -> str:
    """Add the tensor's values in row-major order, in blocks that fit into the core's cache; the
    hash of all that ``digest`` has been fed. Without a ``stream`` they are hashed only."""
    digest = digest or files.Hash()
    for part in _dense_parts(tensor.detach()):
        data = raw(part)
        for at in range(0, len(data), files.BLOCK):
            block = data[at : at + files.BLOCK]
            digest.update(block)
            if stream is not None:
                stream.write(block)
    return digest.hexdigest()


def block_hashes(tensor: torch.Tensor, size: int) -> list[str]:
    """The hash of each ``size`` bytes of the tensor's values in row-major order."""
    digests, room = list[files.Hash](), 0
    for part in _dense_parts(tensor.detach()):
        data = raw(part)
        while len(data):
            if not room:
                digests.append(files.Hash())
                room = size
            digests[-1].update(data[:room])
            data, room = data[room:], max(0, room - len(data))
    return [digest.hexdigest() for digest in digests]


def _dense_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor as contiguous CPU tensors in row-major order; copied block by block if needed."""
    is_plain = tensor.device.type == "cpu" and tensor.is_contiguous()
    # conj() and a negative view only set a bit; the memory has the values without it.
    if is_plain and not (tensor.is_conj() or tensor.is_neg()):
        yield tensor
    else:
        whole = Box.whole(tuple(tensor.shape))
        for box in whole.blocks(files.BLOCK // tensor.element_size()):
            yield _dense(tensor[box.slices_in(whole)])


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return wait_for_ranks(tensor.detach().resolve_conj().resolve_neg().cpu).contiguous()


def new_tensor(stored: TensorEntry | Pieces) -> torch.Tensor:
    """A tensor to read ``stored`` into; a ``CheckpointError`` if there is no memory for it."""
    try:
        return torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    except RuntimeError as error:
        need = f"{stored.num_bytes:,} bytes for a tensor of shape {list(stored.shape)}"
        raise CheckpointError(f"not enough memory: {need}") from error


def fill(tensor: torch.Tensor, file: TensorFile, key: str, box: Box | None = None) -> str:
    """Fill a contiguous CPU tensor with all of ``key``, or a box of it; the hash of the bytes."""
    digest = file.read_into(key, raw(tensor), box)
    _check_bools(tensor, file, key)
    return digest


def read_box(file: TensorFile, key: str, box: Box) -> torch.Tensor:
    """The values of ``box``; no other bytes are read."""
    values = torch.empty(box.shape, dtype=DTYPES[file.entry(key).dtype])
    fill_box(values, file, key, box)
    return values


def fill_box(
    tensor: torch.Tensor, file: TensorFile, key: str, box: Box, digest: files.Hash | None = None
) -> None:
    """Fill a contiguous CPU tensor with the values of ``box``; no other bytes are read. ``digest``
    is fed with them."""
    file.read_box_into(key, box, raw(tensor), digest)
    _check_bools(tensor, file, key)


def _check_bools(tensor: torch.Tensor, file: TensorFile, key: str) -> None:
    """Reject a bool that is neither 0 nor 1, with which torch behaves inconsistently."""
    if tensor.dtype == torch.bool and tensor.numel() and tensor.view(torch.uint8).max() > 1:
        raise CheckpointError(f"{file.path}: {key}: a bool must be 0 or 1")
