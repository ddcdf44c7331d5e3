"""Boxes of tensors in safetensors, as PyTorch's distributed checkpoints (DCP) write them.

Every file's header contains the offsets of its boxes (``disk.tensorfile``), but not the full sizes
of tensors: PyTorch's own reader uses the largest offset it finds. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, counted
from ...parallel.box import Box, is_covered_once
from ...storage import files
from ..disk import strict_json, tensorfile
from ..disk.tensorfile import INFO_KEY, SHAPE_KEY, START_KEY, integers
from ..sources.weights import FolderWeights, StoredBox, TensorLocation
from .layout import Layout


@dataclass(frozen=True)
class DCP(Layout):
    """A distributed checkpoint of PyTorch with Hugging Face storage."""

    name = "dcp"
    title = "PyTorch DCP"
    written_by = ""

    def recognise(self, folder: Path) -> bool:
        """Whether it has files ``shard-00001-model-00001-of-00001.safetensors``."""
        return bool(shard_files(folder))

    def open(self, folder: Path) -> FolderWeights:
        """The tensors, each joined from its boxes."""
        with files.raising(CheckpointError):
            return FolderWeights(self.name, folder, locations(open_boxes(folder)))


_FILE = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True)
class DcpChunk:
    """One box of a tensor of ``shape``, in a file under the tensor's name."""

    file: tensorfile.TensorFile
    shape: tuple[int, ...]
    box: Box


def file_name(rank: int) -> str:
    """PyTorch's name of the file of a rank, without its ending."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001"


def shard_files(folder: Path) -> list[str]:
    """The files of boxes in ``folder``, by their names."""
    return [name for name in files.names_in(folder) if _FILE.fullmatch(name)]


def open_boxes(folder: Path) -> dict[str, list[DcpChunk]]:
    """The boxes of every tensor; a ``CheckpointError`` if they do not cover it."""
    found: dict[str, list[DcpChunk]] = {}
    for name in shard_files(folder):
        file = tensorfile.open_path(folder / name)
        for key, (shape, box) in _boxes(file).items():
            found.setdefault(key, []).append(DcpChunk(file, shape, box))
    if not found:
        raise CheckpointError(
            f"{folder}: it contains no boxes of tensors ({file_name(0)}.safetensors)"
        )
    return {name: _whole(folder, name, boxes) for name, boxes in found.items()}


def _boxes(file: tensorfile.TensorFile) -> Mapping[str, tuple[tuple[int, ...], Box]]:
    """Each tensor's full shape, as far as this file knows it, and the box in it."""
    where = f"{file.path}: {INFO_KEY}"
    told = strict_json.parse_object(file.header.metadata.get(INFO_KEY, "{}").encode(), where)
    found = {}
    for key, entry in file.header.entries.items():
        info: Any = told.get(key, {START_KEY: [0] * len(entry.shape)})
        if not isinstance(info, dict):
            raise CheckpointError(f"{where}: {key[:200]!r} must have {START_KEY}")
        start = integers(info.get(START_KEY), len(entry.shape), f"{where}: {key[:200]!r}")
        box = Box(start, entry.shape)
        shape = info.get(SHAPE_KEY, list(box.stop))
        found[key] = integers(shape, len(entry.shape), f"{where}: {key[:200]!r}"), box
    return found


def _whole(folder: Path, name: str, boxes: Sequence[DcpChunk]) -> list[DcpChunk]:
    """The boxes that cover one tensor; of equal ones the first."""
    where = f"{folder}: tensor {name[:200]!r}"
    kinds = {(one.file.entry(name).dtype, len(one.shape)) for one in boxes}
    if len(kinds) > 1:
        raise CheckpointError(f"{where} has boxes of different types or numbers of dimensions")
    shape = tuple(map(max, zip(*(one.shape for one in boxes), strict=True)))
    apart = {one.box: DcpChunk(one.file, shape, one.box) for one in reversed(boxes)}
    filled = [apart[box] for box in sorted(apart) if box.size] or [*apart.values()][:1]
    if not is_covered_once(Box.whole(shape), [one.box for one in filled]):
        raise CheckpointError(
            f"{where}: its {counted(len(filled), 'box does', 'boxes do')} not cover {list(shape)} "
            "exactly once; is the file of a rank missing, or of another save?"
        )
    return filled


def locations(tensors: Mapping[str, Sequence[DcpChunk]]) -> dict[str, TensorLocation]:
    """Tensors that are several boxes in files."""
    found = {}
    for name, boxes in tensors.items():
        first = boxes[0]
        entry = first.file.entry(name)
        parts = tuple(StoredBox(box.file, name, box.box) for box in boxes) if len(boxes) > 1 else ()
        found[name] = TensorLocation(
            first.file, name, replace(entry, shape=first.shape), None, parts
        )
    return found
