"""PyTorch's distributed checkpoints (DCP) with a pickled index, and FSDP folders of the Trainer.

``.metadata`` is read as inert records (``pickles``), so that no class is built and nothing is
executed; each part of a tensor is loaded when it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.disk.manifest import is_plain_name
from ...checkpoint.sources.source import Shape
from ...checkpoint.sources.weights import DISTRIBUTED
from ...errors import CheckpointError
from ...parallel.box import Box, is_covered_once
from ...storage import files
from .pickles import read_record, read_tensor

INDEX, FSDP = DISTRIBUTED
_TOP = "model"  # of ``dcp.save({"model": model.state_dict()})``


@dataclass(frozen=True)
class _Part:
    """One box of a tensor: an archive as ``torch.save`` writes it, inside a file."""

    box: Box
    file: files.File
    offset: int
    length: int


@dataclass(frozen=True)
class _Stored:
    dtype: torch.dtype
    shape: Shape
    parts: tuple[_Part, ...]


@dataclass(frozen=True)
class Pickled:
    """Tensors in ``.distcp`` files."""

    folder: Path
    tensors: Mapping[str, _Stored]
    _last: dict[tuple[Path, int], torch.Tensor] = field(
        default_factory=dict, repr=False, compare=False
    )

    def shapes(self) -> Mapping[str, Shape]:
        """As stored."""
        return {name: stored.shape for name, stored in self.tensors.items()}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """As stored."""
        return {name: stored.dtype for name, stored in self.tensors.items()}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Only the bytes of ``box``."""
        stored = self.tensors[name]
        found = torch.empty(box.shape, dtype=stored.dtype)
        for part in stored.parts:
            if (common := box & part.box) is not None:
                values = self._loaded(name, stored.dtype, part)
                found[common.slices_in(box)] = values[common.slices_in(part.box)]
        return found

    def _loaded(self, name: str, dtype: torch.dtype, part: _Part) -> torch.Tensor:
        """The values of a part. The last one is kept, as its boxes are read one after another."""
        key = part.file.path, part.offset
        if key not in self._last:
            where = f"{part.file.path}: {name[:200]}"
            with files.raising(CheckpointError):
                values = read_tensor(part.file.read(part.offset, part.length), where)
            if (values.dtype, tuple(values.shape)) != (dtype, part.box.shape):
                raise CheckpointError(
                    f"{where}: {list(values.shape)} of {values.dtype}, expected "
                    f"{list(part.box.shape)} of {dtype}"
                )
            self._last.clear()
            self._last[key] = values
        return self._last[key]


def open_pickled(folder: Path, *, trust_pickle: bool) -> Pickled:
    """The weights in a folder of DCP. Raises ``CheckpointError`` without ``trust_pickle``."""
    if not trust_pickle:
        raise CheckpointError(
            f"{folder}: a distributed checkpoint of PyTorch whose {INDEX} is a pickle; "
            "--trust-pickle reads it without building its classes or executing anything"
        )
    where = folder / INDEX
    with files.open_file(where) as file:
        index = read_record(files.read_all(file, 1 << 30), str(where))
    try:
        return Pickled(folder, _tensors(folder, index))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where}: not the index of a distributed checkpoint ({type(error).__name__}: {error})"
        ) from None


def _tensors(folder: Path, index: Any) -> dict[str, _Stored]:
    """The weights in the index; other saved states are ignored."""
    names = _weights(index)
    places: dict[tuple[str, tuple[int, ...]], Any] = {}
    for key, value in index["storage_data"].items():
        if (offset := key.get("offset")) is not None:
            places[key["fqn"], tuple(offset)] = value
    opened: dict[str, files.File] = {}
    found = {}
    for name, fqn in names.items():
        told = index["state_dict_metadata"][fqn]
        shape = tuple(told["size"])
        boxes = {Box(tuple(c["offsets"]), tuple(c["sizes"])): None for c in told["chunks"]}
        filled = [box for box in boxes if box.size] or list(boxes)[:1]
        if not is_covered_once(Box.whole(shape), filled):
            raise CheckpointError(
                f"{folder}: tensor {name[:200]!r}: its boxes do not cover it exactly once"
            )
        parts = tuple(_part(folder, opened, box, places[fqn, box.start]) for box in filled)
        found[name] = _Stored(told["properties"].state[0], shape, parts)
    return found


def _weights(index: Any) -> dict[str, str]:
    """The tensors of the model, by their names in it: its own, or those under ``model``."""
    paths = index["planner_data"] or {}
    known = {
        fqn: tuple(paths.get(fqn, (fqn,)))
        for fqn, told in index["state_dict_metadata"].items()
        if told.name == "TensorStorageMetadata"
    }
    inside = {path[1]: fqn for fqn, path in known.items() if path[0] == _TOP and len(path) == 2}
    found = inside or {path[0]: fqn for fqn, path in known.items() if len(path) == 1}
    if not found:
        raise CheckpointError("it contains no weights: neither tensors, nor tensors under `model`")
    return found


def _part(folder: Path, opened: dict[str, files.File], box: Box, place: Any) -> _Part:
    name = place["relative_path"]
    if not is_plain_name(name) or "/" in name:
        raise CheckpointError(f"{folder / INDEX}: {name[:200]!r} is not a file in this folder")
    if place.get("transform_descriptors"):
        raise CheckpointError(
            f"{folder / name}: it is compressed or encrypted; read it with PyTorch"
        )
    if name not in opened:
        opened[name] = files.open_inside(folder, name)
    offset, length = int(place["offset"]), int(place["length"])
    if not 0 <= offset <= offset + length <= opened[name].size:
        raise CheckpointError(
            f"{folder / name}: it ends before the tensors that are listed in {INDEX}"
        )
    return _Part(box, opened[name], offset, length)
