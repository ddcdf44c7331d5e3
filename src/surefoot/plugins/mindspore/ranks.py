"""Check that the ranks' files and the strategy belong together, which the files do not say.

A strategy for other files often gives plausible shapes. But replicated slices must have the same
values, and different slices must not be equal everywhere. So the first bytes of the slices are
compared: a few kilobytes of each, whatever their size.

The files of the ranks of one training at one step: ``rank_0/llama_rank_0-2_10...``.

Nothing in such a folder says that a step is complete, or which files belong together. The names do,
and the contents are compared when the files are opened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...checkpoint.disk.tensorfile import ITEM_SIZES, TensorFile
from ...checkpoint.layouts.layout import DcpChunk
from ...errors import CheckpointError
from ...parallel.sharding import Box
from ...storage import files

# Zeros may pad the number, but not to five digits: those folders are Surefoot's own.
FOLDER = re.compile(r"rank_(0|[1-9]\d{0,5}|0\d{1,3})")
_FILE = re.compile(
    r"(?P<prefix>.*)_rank_(?P<rank>\d{1,6})(?:_(?P<again>\d{1,6}))?"
    r"-(?P<kind>network-|trainable_params-)?(?P<epoch>\d{1,12})_(?P<step>\d{1,12})\.safetensors"
)
_CONFIG = "config.json"
INNER = "checkpoint"  # the folder of the ranks in an output folder of MindSpore Transformers


@dataclass(frozen=True, order=True)
class FileStep:
    """The step in a file's name. Restarted tasks number their files from the beginning again."""

    epoch: int
    step: int  # of the epoch
    again: int
    prefix: str
    kind: str

    def __str__(self) -> str:
        return f"{self.epoch}_{self.step}"


def step_of(name: str) -> FileStep | None:
    """The step in the name of a rank's file; None for any other name."""
    match = _FILE.fullmatch(name)
    if match is None:
        return None
    epoch, step, again = (int(match[key] or 0) for key in ("epoch", "step", "again"))
    return FileStep(epoch, step, again, match["prefix"], match["kind"] or "")


def root_of(path: Path) -> Path:
    """The folder that contains ``rank_0``: ``path``, one inside it, or that of a rank's file."""
    if path.suffix == ".safetensors":
        return path.parent.parent
    inner = path / INNER
    return inner if not rank_folders(path) and rank_folders(inner) else path


def model_near(folder: Path) -> Path | None:
    """The folder with the ``config.json`` of a model: ``folder``, or one around its ranks."""
    places = (folder, root_of(folder), root_of(folder).parent)
    return next((place for place in places if files.exists(place / _CONFIG)), None)


def rank_folders(folder: Path) -> dict[int, Path]:
    """The folders of the ranks in ``folder``, by rank."""
    names = files.names_in(folder)
    folders = {int(match[1]): folder / name for name in names if (match := FOLDER.fullmatch(name))}
    return {rank: path for rank, path in sorted(folders.items()) if tensor_files(path)}


def old_file(folder: Path) -> Path | None:
    """A rank's file in MindSpore's older format, if there are such in ``folder``."""
    root = folder / INNER if files.is_folder(folder / INNER) else folder
    paths = [root / "rank_0" / name for name in files.names_in(root / "rank_0")]
    return next((path for path in paths if path.suffix == ".ckpt"), None)


def tensor_files(folder: Path) -> list[str]:
    """The names of safetensors files in ``folder``."""
    return [name for name in files.names_in(folder) if name.endswith(".safetensors")]


def steps(folder: Path) -> list[FileStep]:
    """The steps of which every rank has a file, oldest first."""
    steps_of_ranks = [
        {step for name in tensor_files(path) if (step := step_of(name)) is not None}
        for path in rank_folders(folder).values()
    ]
    return sorted(set.intersection(*steps_of_ranks)) if steps_of_ranks else []


def rank_files(path: Path) -> list[Path]:
    """One file of every rank, all of one step: that of ``path`` if it is a file, or the latest."""
    root = root_of(path)
    folders = rank_folders(root)
    if not folders:
        raise CheckpointError(
            f"{root}: contains no folders rank_0, rank_1, ... with safetensors files"
        )
    missing = sorted(set(range(max(folders) + 1)) - folders.keys())
    if missing:
        raise CheckpointError(f"{root}: the files of rank {missing[0]} are missing")
    if path.suffix == ".safetensors":
        step = step_of(path.name)
        if step is not None:
            return [file_at(folder, step) for folder in folders.values()]
    return _newest(root, folders)


def file_at(folder: Path, step: FileStep) -> Path:
    """The file of that step in one rank's folder; a ``CheckpointError`` if it has none."""
    for name in tensor_files(folder):
        if step_of(name) == step:
            return folder / name
    raise CheckpointError(f"{folder}: contains no file of step {step}, as other ranks do")


def _newest(root: Path, folders: Mapping[int, Path]) -> list[Path]:
    """The latest file of every rank; all must be of one step."""
    latest: list[tuple[FileStep | None, Path]] = []
    for folder in folders.values():
        names = tensor_files(folder)
        dated = [(step, name) for name in names if (step := step_of(name)) is not None]
        if len(names) > 1 and len(dated) < len(names):
            raise CheckpointError(
                f"{folder}: {len(names)} files whose names contain no step (expected for "
                "example llama_rank_0-2_10.safetensors)"
            )
        if len({(step.prefix, step.kind) for step, _ in dated}) > 1:
            raise CheckpointError(
                f"{folder}: files of several trainings; name the one to read, for example "
                f"{folder / dated[-1][1]}"
            )
        step, name = max(dated) if dated else (None, names[0])
        latest.append((step, folder / name))
    # MindSpore's merge takes the latest file of each rank and mixes steps without a word: a rank
    # that is behind is a fault, and its user should say what to take (decisions/0032).
    first, path = latest[0]
    for step, other in latest:
        if step != first:
            raise CheckpointError(
                f"{root}: ranks of different steps: {path.name} beside {other.name}"
                + _way_out(root, folders)
            )
    return [path for _, path in latest]


def _way_out(root: Path, folders: Mapping[int, Path]) -> str:
    common = steps(root)
    if not common:
        return "; no step exists on all ranks"
    first = file_at(folders[min(folders)], common[-1])
    return f"; the latest step on all ranks is {first}"


_BYTES = 1024  # of every slice
_ELEMENTS = 8  # of a slice; fewer say little
STEP_NAMES = ("epoch_num", "step_num", "global_step")


@dataclass(frozen=True)
class Slice:
    """One rank's slice of a tensor."""

    rank: int
    stored: DcpChunk


def check_step(opened: Sequence[TensorFile]) -> None:
    """Reject files that were saved at different steps, as far as they contain the step."""
    for name in STEP_NAMES:
        recorded = {file.path: _all(file, name) for file in opened if name in file.header.entries}
        for path, value in recorded.items():
            first = next(iter(recorded))
            if value != recorded[first]:
                raise CheckpointError(
                    f"{path}: saved at another step than {first} ({name}: "
                    f"{_number(value)} and {_number(recorded[first])})"
                )


def check_fit(slices: Mapping[str, Sequence[Slice]], strategy: Path) -> None:
    """Reject a strategy in which replicated slices differ, or different slices are equal."""
    # Nothing says that these files and this strategy belong together, so the values have to:
    # whoever has the same part has the same first kilobyte (decisions/0032).
    for name, parts in slices.items():
        heads = {part.rank: _head(part.stored.file, name) for part in parts}
        part_at: dict[Box, Slice] = {}
        for part in parts:
            first = part_at.setdefault(part.stored.box, part)
            if heads[first.rank] != heads[part.rank]:
                raise CheckpointError(
                    f"{strategy}: does not fit: ranks {first.rank} and {part.rank} would have "
                    f"the same part of {name[:200]!r}, but their files differ"
                )
        seen: dict[bytes, int] = {}
        for part in part_at.values() if len(part_at) > 1 else ():
            other = seen.setdefault(heads[part.rank], part.rank)
            if other != part.rank and _says_much(part.stored, name, heads[part.rank]):
                raise CheckpointError(
                    f"{strategy}: does not fit: ranks {other} and {part.rank} would have "
                    f"different parts of {name[:200]!r}, but their files are equal"
                )


def _says_much(stored: DcpChunk, name: str, head: bytes) -> bool:
    """Whether equal first bytes are unlikely by chance: moments start as 0, norms as 1."""
    item = ITEM_SIZES[stored.file.entry(name).dtype]
    return stored.box.size >= _ELEMENTS and head != head[:item] * (len(head) // item)


def check_same(name: str, replicas: Sequence[tuple[int, TensorFile]]) -> None:
    """Reject a tensor without a layout that differs between ranks' files."""
    first_rank, first = replicas[0]
    for rank, file in replicas[1:]:
        has_same_shape = file.entry(name).shape == first.entry(name).shape
        if not has_same_shape or file.hash(name) != first.hash(name):
            raise CheckpointError(
                f"{first.path}: the slicing of {name[:200]!r} is unknown, and ranks "
                f"{first_rank} and {rank} have different parts of it; save the strategy files "
                "with only_trainable_params: False"
            )


def _head(file: TensorFile, name: str) -> bytes:
    entry = file.entry(name)
    count = _BYTES // ITEM_SIZES[entry.dtype]
    for box in Box.whole(entry.shape).blocks(count):
        return _values(file, name, box)
    return b""


def _all(file: TensorFile, name: str) -> bytes:
    entry = file.entry(name)
    return _values(file, name, Box.whole(entry.shape)) if entry.num_bytes <= _BYTES else b""


def _values(file: TensorFile, name: str, box: Box) -> bytes:
    buffer = bytearray(box.size * ITEM_SIZES[file.entry(name).dtype])
    file.read_box_into(name, box, memoryview(buffer))
    return bytes(buffer)


def recorded_step(file: TensorFile) -> int | None:
    """The training step in a file."""
    for name in ("step_num", "global_step"):
        if name in file.header.entries and (number_bytes := _all(file, name)):
            return _number(number_bytes)
    return None


_number = partial(int.from_bytes, byteorder="little", signed=True)
