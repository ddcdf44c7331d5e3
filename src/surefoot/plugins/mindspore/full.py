"""MindSpore's weights without slicing: ``part0.safetensors`` with its map, or a single file."""

from __future__ import annotations

import re
from pathlib import Path

from ...checkpoint.disk import strict_json, tensorfile
from ...checkpoint.disk.manifest import is_plain_name
from ...checkpoint.layouts.dcp import DcpChunk
from ...errors import CheckpointError
from ...parallel.box import Box
from ...storage import files
from .ranks import FOLDER, step_of, tensor_files

MAP = "param_name_map.json"
HYPER = "hyper_param.safetensors"  # of training: step numbers, learning rate, loss scale
PART = "part{}.safetensors"
_PART = re.compile(r"part\d{1,6}\.safetensors")


def recognise(folder: Path) -> bool:
    """Whether it has unsharded tensors; a single file must name MindSpore in its header."""
    names = tensor_files(folder)
    if not names:
        return False
    if files.exists(folder / MAP) or HYPER in names or all(map(_PART.fullmatch, names)):
        return True
    return len(names) == 1 and _is_mindspore(folder / names[0])


def open_full(folder: Path) -> dict[str, list[DcpChunk]]:
    """All tensors of the folder; an error if one is missing or the folder belongs to one rank."""
    names = [name for name in tensor_files(folder) if name != HYPER]
    if FOLDER.fullmatch(folder.name) and any(map(step_of, names)):
        raise CheckpointError(
            f"{folder}: the part of one rank; use the folder of all ranks, {folder.parent}"
        )
    where = folder / MAP
    told = _read_map(where) if files.exists(where) else None
    if told is None and len(names) != 1:
        raise CheckpointError(f"{folder}: {len(names)} files, and no {MAP} that says what is whole")
    wanted = names if told is None else sorted(set(told.values()))
    found: dict[str, list[DcpChunk]] = {}
    for name in [*wanted, *([HYPER] if files.exists(folder / HYPER) else [])]:
        file = tensorfile.open_path(folder / name)
        for key in file.header.entries:
            if key in found:
                other = found[key][0].file.path.name
                raise CheckpointError(f"{file.path}: {key[:200]!r} is in {other} as well")
            found[key] = [whole(file, key)]
    for key, name in (told or {}).items():
        if key not in found or found[key][0].file.path.name != name:
            raise CheckpointError(f"{where}: promises {key[:200]!r} in {name}, where it is not")
    return found


def whole(file: tensorfile.TensorFile, name: str) -> DcpChunk:
    """A tensor that is completely in one file."""
    shape = file.entry(name).shape
    return DcpChunk(file, shape, Box.whole(shape))


def _is_mindspore(path: Path) -> bool:
    try:
        with tensorfile.open_path(path) as file:
            return file.header.metadata.get("format") == "ms"
    except (OSError, CheckpointError):  # whoever opens it says what is wrong
        return False


def _read_map(where: Path) -> dict[str, str]:
    """File names by tensor: as ``weight_map``, or without anything around it."""
    told = strict_json.read_object(where)
    names = told.get("weight_map", told)
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f"{where}: expected file names by tensor name")
    for name in sorted(set(names.values())):
        if not is_plain_name(name) or "/" in name:
            raise CheckpointError(f"{where}: {name[:200]!r} is not a file in this folder")
    return names
