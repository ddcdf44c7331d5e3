"""Write any source as Hugging Face weight files, block by block, in bounded memory."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path

import torch

from .. import files
from ..errors import CheckpointError
from .box import Box
from .bytes import DTYPES, NAMES, write_tensor
from .plan import FilePlan, plan_save
from .save import dump_index
from .source import Cast, Source

_BLOCK = 16 << 20  # bytes read, computed and written at a time
_CASTS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def copy(
    source: Source,
    target_folder: Path,
    *,
    stem: str = "model",
    dtype: str | None = None,
    max_shard_size: int | None = 5_000_000_000,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write ``source`` into ``target_folder`` as ``{stem}.safetensors``, or as shards and an index.

    ``dtype`` (float32, float16, bfloat16) casts floating point tensors. ``progress`` is told the
    number of bytes of each block written. The files appear when all are whole; a folder that has
    such weights already is refused.
    """
    if dtype is not None:
        if dtype not in _CASTS:
            raise CheckpointError(f"dtype {dtype!r}: expected one of {', '.join(_CASTS)}")
        source = Cast(source, _CASTS[dtype])
    dtypes = source.dtypes()
    tensors = {name: (NAMES[dtypes[name]], shape) for name, shape in source.shapes().items()}
    plans = plan_save(stem, tensors, max_shard_size)
    nonce = secrets.token_hex(4)
    with files.raising(CheckpointError, f"cannot write weights to {target_folder}"):
        files.make_folder(target_folder)
        _refuse_old(target_folder, stem)
        aside = {plan.name: target_folder / f".{plan.name}.{nonce}.part" for plan in plans}
        try:
            for plan in plans:
                _write(source, aside[plan.name], plan, progress)
            for name, path in aside.items():
                files.rename(path, target_folder / name)
        finally:
            with contextlib.suppress(OSError):
                for path in aside.values():
                    files.remove_tree(path)
        if len(plans) > 1:
            files.write_aside(target_folder / f"{stem}.safetensors.index.json", dump_index(plans))
        files.sync_folder(target_folder)


def _refuse_old(folder: Path, stem: str) -> None:
    for name in files.list_folder(folder):
        if name.startswith(stem) and ".safetensors" in name:
            raise CheckpointError(
                f"{folder / name}: there are weights already; choose another folder"
            )


def _write(
    source: Source, path: Path, plan: FilePlan, progress: Callable[[int], None] | None
) -> None:
    with files.create(path) as file:
        file.reserve(plan.header.file_size)
        file.write_at(0, plan.head)
        for name, entry in plan.header.entries.items():
            offset = entry.offset
            dtype = DTYPES[entry.dtype]
            for box in Box.whole(entry.shape).blocks(_BLOCK // dtype.itemsize):
                block = source.read(name, box)
                write_tensor(file, offset, block)
                offset += block.nbytes
                if progress is not None:
                    progress(block.nbytes)
        file.sync()
