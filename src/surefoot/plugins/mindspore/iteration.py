"""The newer form of MindSpore Transformers 2.x: ``iteration_00000020`` with ``metadata.json``.

``metadata.json`` gives the file of each slice of each tensor. Its "offset" is the number of the
slice, counted row by row over the parts of all dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from typing import Any

from ...checkpoint.disk import strict_json, tensorfile
from ...checkpoint.disk.manifest import is_plain_name
from ...checkpoint.disk.tensorfile import integers, sizes
from ...checkpoint.layouts.layout import DcpChunk
from ...errors import CheckpointError, counted
from ...parallel.sharding import Box, is_covered_once
from ...storage import files
from .ranks import FOLDER, check_same, step_of, tensor_files

TRACKER = "latest_checkpointed_iteration.txt"
METADATA, COMMON = "metadata.json", "common.json"
ITERATION = "iteration_{:08d}"
_ITERATION = re.compile(r"iteration_(\d{8,12})")
_FILE = re.compile(r".*-(model|opt)-(\d{7,})-(\d{7,})\.safetensors")
# The text of a tuple of Python's, ('name', (3,)): a tensor, and the number of a slice.
_KEY = re.compile(r"\(['\"](.+)['\"], \((\d{1,9}),\)\)")


def is_iteration(folder: Path) -> bool:
    """Whether ``folder`` is an iteration, or contains some."""
    return _is_one(folder) or (files.exists(folder / TRACKER) and bool(iterations(folder)))


def _is_one(folder: Path) -> bool:
    names = files.names_in(folder)
    has_files = any(map(_FILE.fullmatch, names))
    return has_files and (COMMON in names or METADATA in names)


def iterations(root: Path) -> list[Path]:
    """The iterations in ``root``, oldest first."""
    paths = [root / name for name in files.names_in(root)]
    paths_by_number = {n: path for path in paths if (n := number_of(path)) is not None}
    return [path for _, path in sorted(paths_by_number.items()) if _is_one(path)]


def number_of(folder: Path) -> int | None:
    """The number in an iteration's name."""
    match = _ITERATION.fullmatch(folder.name)
    return int(match[1]) if match else None


def chosen(folder: Path) -> Path:
    """The iteration in ``folder``, or the one that its tracker file names."""
    if _is_one(folder):
        return folder
    with files.open_file(folder / TRACKER) as file:
        text = files.read_all(file, strict_json.MAX_BYTES).decode("utf-8", "replace").strip()
    # The one that the tracker names, not the newest: it is written last, so a
    # newer folder may be half there.
    for path in iterations(folder):
        if text.isdecimal() and number_of(path) == int(text):
            return path
    raise CheckpointError(
        f"{folder / TRACKER}: names iteration {text[:40]!r}, which does not exist"
    )


def open_iteration(folder: Path) -> dict[str, list[DcpChunk]]:
    """The slices of every tensor; a ``CheckpointError`` if a file or a slice is missing."""
    path = chosen(folder)
    names = [name for name in files.list_folder(path) if _FILE.fullmatch(name)]
    if not files.exists(path / METADATA):
        return _open_single(path, names)
    where = path / METADATA
    metadata = strict_json.read_object(where)
    tensors, storage = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if not isinstance(tensors, dict) or not isinstance(storage, dict):
        raise CheckpointError(f"{where}: expected state_dict_metadata and storage_data")
    places = _places(storage, where)
    opened: dict[str, tensorfile.TensorFile] = {}
    for file_names in places.values():
        for name in file_names.values():
            if name not in opened:
                if not files.exists(path / name):
                    raise CheckpointError(f"{path / name}: is missing; {METADATA} names it")
                opened[name] = tensorfile.open_path(path / name)
    chunks = {
        name: _slices(name, value, places.get(name, {}), opened, where)
        for name, value in tensors.items()
    }
    return chunks | _loose(opened, tensors)


def _loose(
    opened: Mapping[str, tensorfile.TensorFile], described: Collection[str]
) -> dict[str, list[DcpChunk]]:
    """Values outside of the metadata, such as the step: the same in every file."""
    holders: dict[str, list[tuple[int, tensorfile.TensorFile]]] = {}
    for i, file in enumerate(opened.values()):
        for key in file.header.entries:
            if key not in described:
                holders.setdefault(key, []).append((i, file))
    for key, replicas in holders.items():
        check_same(key, replicas)
    return {key: [whole(replicas[0][1], key)] for key, replicas in sorted(holders.items())}


def _open_single(path: Path, names: list[str]) -> dict[str, list[DcpChunk]]:
    """The files of a single process: unsharded tensors, and no metadata."""
    chunks: dict[str, list[DcpChunk]] = {}
    for name in names:
        match = _FILE.fullmatch(name)
        assert match is not None
        if int(match[3]) != 1:
            raise CheckpointError(
                f"{path}: {name} is one of {int(match[3])}, and {METADATA} is missing"
            )
        single = tensorfile.open_path(path / name)
        for key in single.header.entries:
            chunks[key] = [whole(single, key)]
    return chunks


def _places(storage: Mapping[str, Any], where: Path) -> dict[str, dict[int, str]]:
    """The file of every slice, by tensor and number of the slice; of replicas the first."""
    places: dict[str, dict[int, str]] = {}
    for key, files_of in storage.items():
        match = _KEY.fullmatch(key)
        first = files_of[0] if isinstance(files_of, list) and files_of else None
        name = first.get("file_name") if isinstance(first, dict) else None
        if match is None or not isinstance(name, str):
            raise CheckpointError(f"{where}: storage_data: cannot read {key[:200]!r}")
        if not is_plain_name(name) or "/" in name:
            raise CheckpointError(f"{where}: {name[:200]!r} is not a file in this folder")
        places.setdefault(match[1], {})[int(match[2])] = name
    return places


def _slices(
    name: str,
    value: Any,
    places: Mapping[int, str],
    opened: Mapping[str, tensorfile.TensorFile],
    metadata: Path,
) -> list[DcpChunk]:
    """The slices of one tensor; together they cover it."""
    where = f"{metadata}: {name[:200]!r}"
    if not isinstance(value, dict) or not isinstance(value.get("chunk"), list):
        raise CheckpointError(f"{where}: expected global_shape, axis_fragmentations and chunk")
    shape = sizes(value.get("global_shape"), where)
    counts = integers(value.get("axis_fragmentations") or [1] * len(shape), len(shape), where)
    chunks = []
    for entry in value["chunk"]:
        fields = entry if isinstance(entry, dict) else {}
        (number,) = integers(fields.get("global_offset"), 1, where)
        box = _box(number, shape, counts, where)
        file = opened.get(places.get(number, ""))
        if file is None or name not in file.header.entries:
            raise CheckpointError(f"{where}: slice {number} is in no file")
        if (
            sizes(fields.get("local_shape"), where) != box.shape
            or file.entry(name).shape != box.shape
        ):
            raise CheckpointError(
                f"{where}: slice {number} is {list(file.entry(name).shape)}, expected "
                f"{list(box.shape)}"
            )
        chunks.append(DcpChunk(file, shape, box))
    if not is_covered_once(Box.whole(shape), [chunk.box for chunk in chunks]):
        parts = counted(len(chunks), "slice does", "slices do")
        raise CheckpointError(f"{where}: its {parts} not cover {list(shape)}")
    if len({chunk.file.entry(name).dtype for chunk in chunks}) > 1:
        raise CheckpointError(f"{where}: its slices are of different types")
    return chunks


def _box(number: int, shape: tuple[int, ...], counts: tuple[int, ...], where: str) -> Box:
    uneven = any(c < 1 or n % c for n, c in zip(shape, counts, strict=True))
    if uneven or number >= prod(counts):
        raise CheckpointError(f"{where}: {list(shape)} has no slice {number} of {list(counts)}")
    start, extent = [], []
    for length, count in zip(reversed(shape), reversed(counts), strict=True):
        number, place = divmod(number, count)
        start.append(place * (length // count))
        extent.append(length // count)
    return Box(tuple(start[::-1]), tuple(extent[::-1]))


MAP = "param_name_map.json"
HYPER = "hyper_param.safetensors"  # of training: step numbers, learning rate, loss scale
PART = "part{}.safetensors"
_PART = re.compile(r"part\d{1,6}\.safetensors")


def is_full(folder: Path) -> bool:
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
    weight_map = _read_map(where) if files.exists(where) else None
    if weight_map is None and len(names) != 1:
        raise CheckpointError(f"{folder}: {len(names)} files, and no {MAP} that says what is whole")
    file_names = names if weight_map is None else sorted(set(weight_map.values()))
    chunks: dict[str, list[DcpChunk]] = {}
    for name in [*file_names, *([HYPER] if files.exists(folder / HYPER) else [])]:
        file = tensorfile.open_path(folder / name)
        for key in file.header.entries:
            if key in chunks:
                other = chunks[key][0].file.path.name
                raise CheckpointError(f"{file.path}: {key[:200]!r} is in {other} as well")
            chunks[key] = [whole(file, key)]
    for key, name in (weight_map or {}).items():
        if key not in chunks or chunks[key][0].file.path.name != name:
            raise CheckpointError(f"{where}: promises {key[:200]!r} in {name}, where it is not")
    return chunks


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
    content = strict_json.read_object(where)
    names = content.get("weight_map", content)
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f"{where}: expected file names by tensor name")
    for name in sorted(set(names.values())):
        if not is_plain_name(name) or "/" in name:
            raise CheckpointError(f"{where}: {name[:200]!r} is not a file in this folder")
    return names
