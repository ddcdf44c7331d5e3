"""Write any tensor source as Hugging Face weight files, block by block, in bounded memory."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from ...errors import CheckpointError
from ...parallel.box import Box
from ...storage import files
from ...storage.parallel_work import ahead
from ..disk.bytes import ByteStream, dtype_name, write_tensor
from ..disk.tensorfile import FilePlan, explained, plan_save
from ..saving.preparation import dump_index
from .source import CastSource, Shape, TensorSource

Progress = Callable[[int], None]  # is told the bytes of each block written
_PART = ".part"
_BLOCK = 1 << 20  # bytes read, computed and written at a time: still in the cache as float32
DtypeName = Literal["float32", "float16", "bfloat16"]
CASTS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def copy(
    source: TensorSource,
    target_folder: Path | str,
    *,
    stem: str = "model",
    dtype: str | None = None,
    max_shard_size: int | None = 5_000_000_000,
    progress: Progress | None = None,
) -> None:
    """Write ``source`` into ``target_folder`` as ``{stem}.safetensors``, or as several files and an
    index.

    ``dtype`` (float32, float16, bfloat16) casts floating point tensors. The files appear when all
    are complete; a folder that already contains such weights is rejected.
    """
    source, folder = cast(source, dtype), Path(target_folder)
    plans = plan_save(stem, described(source), max_shard_size)
    with files.raising(CheckpointError, f"cannot write weights to {folder}"):
        files.make_folder(folder)
        _make_room(folder, stem)
        _write(source, folder, plans, progress or silent)
        if len(plans) > 1:
            files.write_aside(folder / f"{stem}.safetensors.index.json", dump_index(plans))
        files.sync_folder(folder)


def cast(source: TensorSource, dtype: str | None) -> TensorSource:
    """``source`` with its floating point tensors as ``dtype``; unchanged if that is None."""
    if dtype is None:
        return source
    if dtype not in CASTS:
        raise CheckpointError(f"dtype {dtype!r}: expected one of {', '.join(CASTS)}")
    return CastSource(source, CASTS[dtype])


def described(source: TensorSource) -> dict[str, tuple[str, Shape]]:
    """The stored dtype and shape of every tensor."""
    dtypes = source.dtypes()
    return {name: (dtype_name(name, dtypes[name]), s) for name, s in source.shapes().items()}


def silent(num_bytes: int) -> None:
    """Report no progress."""


def _make_room(folder: Path, stem: str) -> None:
    """Reject a folder with such weights; delete the leftovers of a killed copy."""
    for name in files.list_folder(folder):
        if name.startswith(stem) and ".safetensors" in name:
            raise CheckpointError(f"{folder / name}: it exists already; choose another folder")
        if name.startswith(f".{stem}") and name.endswith(_PART):
            with (
                contextlib.suppress(BlockingIOError),  # another process writes it
                files.open_file(folder / name, follow=False, write=True) as file,
            ):
                if file.lock():
                    files.remove_tree(folder / name)


def _write(
    source: TensorSource, folder: Path, plans: Sequence[FilePlan], progress: Progress
) -> None:
    """Write all files under temporary names, then rename them."""
    nonce = secrets.token_hex(4)
    with contextlib.ExitStack() as stack:
        opened = []
        for plan in plans:
            path = folder / f".{plan.name}.{nonce}{_PART}"
            file = stack.enter_context(files.create(path))
            stack.callback(_remove, path)
            file.lock()
            file.reserve(plan.header.file_size)
            file.bypass_cache()
            opened.append(file)
        for file, plan in zip(opened, plans, strict=True):
            fill(file, source, plan, progress)
        for file, plan in zip(opened, plans, strict=True):
            files.rename(file.path, folder / plan.name)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # what stopped the copy matters more
        files.remove_tree(path)


def fill(
    file: files.File, source: TensorSource, plan: FilePlan, progress: Progress
) -> dict[str, str]:
    """Write and flush a planned file; the hash of the bytes of each tensor, or box, by name."""
    boxes = {name: box for name, (_, box) in explained(plan.header).items()}
    return fill_boxes(file, source, plan.head, boxes, progress)


def fill_boxes(
    file: files.File,
    source: TensorSource,
    head: bytes,
    boxes: Mapping[str, Box],
    progress: Progress,
) -> dict[str, str]:
    """The same of a file that has these boxes of tensors after its head, in their order. The next
    block is read, and checked, in a thread while one is hashed and written."""
    digests, dtypes = {name: files.Hash() for name in boxes}, source.dtypes()
    blocks = [
        (name, part)
        for name, box in boxes.items()
        for part in box.blocks(_BLOCK // dtypes[name].itemsize)
    ]
    with ByteStream(file) as stream:
        stream.write(head)
        read = ahead(lambda block: source.read(*block), blocks)
        for (name, _), values in zip(blocks, read, strict=True):
            write_tensor(stream, values, digests[name])
            progress(values.nbytes)
    return {name: digest.hex() for name, digest in digests.items()}
