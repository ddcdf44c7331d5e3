"""Check that the ranks' files and the strategy belong together, which the files do not say.

A strategy for other files often gives plausible shapes. But replicated slices must have the same
values, and different slices must not be equal everywhere. So the first bytes of the slices are
compared: a few kilobytes of each, whatever their size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ....checkpoint.disk.tensorfile import ITEM_SIZES, TensorFile
from ....checkpoint.layouts.dcp import DcpChunk
from ....errors import CheckpointError
from ....parallel.box import Box

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
        told = {file.path: _all(file, name) for file in opened if name in file.header.entries}
        for path, value in told.items():
            first = next(iter(told))
            if value != told[first]:
                raise CheckpointError(
                    f"{path}: saved at another step than {first} ({name}: "
                    f"{_number(value)} and {_number(told[first])})"
                )


def check_fit(slices: Mapping[str, Sequence[Slice]], strategy: Path) -> None:
    """Reject a strategy in which replicated slices differ, or different slices are equal."""
    for name, own in slices.items():
        heads = {one.rank: _head(one.stored.file, name) for one in own}
        apart: dict[Box, Slice] = {}
        for one in own:
            first = apart.setdefault(one.stored.box, one)
            if heads[first.rank] != heads[one.rank]:
                raise CheckpointError(
                    f"{strategy}: does not fit: ranks {first.rank} and {one.rank} would have "
                    f"the same part of {name[:200]!r}, but their files differ"
                )
        seen: dict[bytes, int] = {}
        for one in apart.values() if len(apart) > 1 else ():
            other = seen.setdefault(heads[one.rank], one.rank)
            if other != one.rank and _says_much(one.stored, name, heads[one.rank]):
                raise CheckpointError(
                    f"{strategy}: does not fit: ranks {other} and {one.rank} would have "
                    f"different parts of {name[:200]!r}, but their files are equal"
                )


def _says_much(stored: DcpChunk, name: str, head: bytes) -> bool:
    """Whether equal first bytes are unlikely by chance: moments start as 0, norms as 1."""
    item = ITEM_SIZES[stored.file.entry(name).dtype]
    return stored.box.size >= _ELEMENTS and head != head[:item] * (len(head) // item)


def check_same(name: str, found: Sequence[tuple[int, TensorFile]]) -> None:
    """Reject a tensor without a layout that differs between ranks' files."""
    first_rank, first = found[0]
    for rank, file in found[1:]:
        same = file.entry(name).shape == first.entry(name).shape
        if not same or file.hash(name) != first.hash(name):
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
    found = bytearray(box.size * ITEM_SIZES[file.entry(name).dtype])
    file.read_box_into(name, box, memoryview(found))
    return bytes(found)


def recorded_step(file: TensorFile) -> int | None:
    """The training step in a file."""
    for name in ("step_num", "global_step"):
        if name in file.header.entries and (found := _all(file, name)):
            return _number(found)
    return None


_number = partial(int.from_bytes, byteorder="little", signed=True)
