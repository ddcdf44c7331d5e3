"""Strategy files of MindSpore: the layout of every tensor, by pipeline stage.

They are protocol buffers with the ending ``.ckpt``, or JSON. A merged file covers all stages, with
the stage's number as a prefix of the names. They contain no ranks and usually no shapes; the reader
must check that they fit the files beside them. The wire format of protocol buffers is read as far
as strategy files need it. No length is trusted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ...checkpoint.disk import strict_json
from ...errors import CheckpointError
from ...storage import files
from .tensor_layout import Layouts, TensorLayout

ENDINGS = (".ckpt", ".json")
_FOLDER = "strategy"  # beside the ranks' folders, or beside the one that holds them
FILE = "ckpt_strategy_rank_{}.ckpt"
_OF_RANK = re.compile(r".*_rank_(\d{1,6})\.(?:ckpt|json)")
_OF_STAGE = re.compile(r"(\d{1,6})-(.+)")
_MOST_BYTES = 256 << 20
_MOST_DEVICES = 1 << 20


@dataclass(frozen=True)
class Strategy:
    """The layouts of every stage of a pipeline. All stages have as many devices."""

    stages: Sequence[Layouts]
    where: Path

    @property
    def num_devices(self) -> int:
        """Of one stage."""
        return next(layout.num_devices for layouts in self.stages for layout in layouts.values())

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.num_devices * len(self.stages)

    def of_rank(self, rank: int) -> tuple[Layouts, int]:
        """The layouts of a rank's pipeline stage, and the rank's device in the stage."""
        stage, device = divmod(rank, self.num_devices)
        return self.stages[stage], device


def open_strategy(path: Path) -> Strategy:
    """A merged file, that of a single stage, or a folder of ranks' files, which must agree."""
    with files.raising(CheckpointError, f"cannot read {path}"):
        if files.is_folder(path):
            names = [name for name in files.list_folder(path) if name.endswith(ENDINGS)]
            paths = [path / name for name in names]
        else:
            paths = [path]
        if not paths:
            raise CheckpointError(f"{path}: contains no strategy files (*.ckpt or *.json)")
        parsed = {file: _parse(file) for file in paths}
    return _checked(_by_stage(parsed, path), path)


def strategy_near(root: Path) -> Path | None:
    """The folder of strategy files that belongs to the folder of ranks ``root``."""
    for folder in (root / _FOLDER, root.parent / _FOLDER):
        if files.is_folder(folder) and any(n.endswith(ENDINGS) for n in files.list_folder(folder)):
            return folder
    return None


def _parse(file: Path) -> tuple[int, dict[str, TensorLayout]]:
    """The stage of a file, and its layouts."""
    with files.open_file(file) as opened:
        data = files.read_all(opened, _MOST_BYTES)
    return _from_json(data, str(file)) if file.suffix == ".json" else _from_wire(data, str(file))


def _by_stage(
    parsed: Mapping[Path, tuple[int, dict[str, TensorLayout]]], path: Path
) -> dict[int, dict[str, TensorLayout]]:
    """The layouts of each stage; those of its ranks are equal."""
    stages: dict[int, dict[str, TensorLayout]] = {}
    for file, (written_stage, layouts) in parsed.items():
        rank = _OF_RANK.fullmatch(file.name)
        stage_names = [_OF_STAGE.fullmatch(name) for name in layouts]
        if rank is None and layouts and all(stage_names):  # a merged file
            for match, layout in zip(stage_names, layouts.values(), strict=True):
                assert match is not None
                stages.setdefault(int(match[1]), {})[match[2]] = layout
            continue
        stage = written_stage
        if rank is not None and layouts:  # what it says of its stage may be missing
            stage = int(rank[1]) // next(iter(layouts.values())).num_devices
        if stages.setdefault(stage, layouts) != layouts:
            raise CheckpointError(
                f"{file}: differs from the files of the same pipeline stage ({stage}) in {path}"
            )
    return stages


def _checked(stages: Mapping[int, Layouts], path: Path) -> Strategy:
    if not any(stages.values()):
        raise CheckpointError(f"{path}: it describes no tensors")
    stages_with_tensors = {stage for stage, layouts in stages.items() if layouts}
    if missing := sorted(set(range(max(stages) + 1)) - stages_with_tensors):
        raise CheckpointError(f"{path}: the strategy of pipeline stage {missing[0]} is missing")
    sizes = {layout.num_devices for layouts in stages.values() for layout in layouts.values()}
    if len(sizes) > 1:
        device_counts = " and ".join(map(str, sorted(sizes)[:2]))
        raise CheckpointError(
            f"{path}: tensors are on {device_counts} devices; a stage has one number"
        )
    return Strategy([stages[stage] for stage in sorted(stages)], path)


def _from_wire(data: bytes, where: str) -> tuple[int, dict[str, TensorLayout]]:
    """A ``ParallelStrategyMap``: its items 2 say the stage, its items 3 a tensor's layout."""
    # Field 1, current_stage, is not read: in files of MindSpore 2.10 it counts compilations.
    stage, layouts = 0, {}
    for number, item in wire_fields(data, where):
        if number == 2 and isinstance(item, bytes):
            strategy = _messages(item, where).get(2, [b""])[0]
            stages = _messages(strategy, where).get(1, [0])
            stage = stages[-1] if isinstance(stages[-1], int) else 0
        elif number == 3 and isinstance(item, bytes):
            parts = _messages(item, where)
            name, content = (_bytes(parts.get(n, [b""])[-1], where) for n in (1, 2))
            text = name.decode("utf-8", "replace")
            layouts[text] = _layout_from_wire(content, where, text)
    return stage, layouts


def _layout_from_wire(content: bytes, where: str, name: str) -> TensorLayout:
    """A ``ParallelLayouts``: 1 the matrix, 2 tensor maps, 3 and 4 uneven slices, 5 field, 6 and 7
    the optimizer's step and shards."""
    values = _messages(content, where)

    def lists(number: int) -> list[tuple[int, ...]]:
        return [
            integers(_messages(value, where).get(1, []), where) for value in values.get(number, [])
        ]

    def scalar(number: int) -> int:
        return (integers(values.get(number, [0])[-1:], where) or (0,))[0]

    matrices, tensor_maps = lists(1), lists(2)
    field, step, num_shards = scalar(5), scalar(6), scalar(7)
    if field or any(lists(3)) or any(lists(4)):
        raise _uneven(where, name)
    matrix = matrices[0] if matrices else ()
    return _layout(matrix, tuple(tensor_maps), (num_shards, step), f"{where}: {name}")


def _messages(data: Value, where: str) -> dict[int, list[Value]]:
    """The values of a message by their number."""
    values: dict[int, list[Value]] = {}
    for number, value in wire_fields(_bytes(data, where), where):
        values.setdefault(number, []).append(value)
    return values


def _bytes(value: Value, where: str) -> bytes:
    if not isinstance(value, bytes):
        raise CheckpointError(f"{where}: not a strategy file of MindSpore")
    return value


def _from_json(data: bytes, where: str) -> tuple[int, dict[str, TensorLayout]]:
    content = strict_json.parse_object(data, where)
    items, stages = content.get("parallel_layout_item"), content.get("parallel_strategy_item")
    if not isinstance(items, dict) or not all(isinstance(item, dict) for item in items.values()):
        raise CheckpointError(f"{where}: expected parallel_layout_item with an entry per tensor")
    first: object = next(iter(stages.values()), {}) if isinstance(stages, dict) else {}
    stage = first.get("stage", 0) if isinstance(first, dict) else 0
    return int(stage), {name: _of_json(name, item, where) for name, item in items.items()}


def _of_json(name: str, item: Mapping[str, Any], where: str) -> TensorLayout:
    if item.get("field") or item.get("param_split_shape") or item.get("indices_offset"):
        raise _uneven(where, name)
    where = f"{where}: {name}"
    matrix = _whole_numbers(item.get("dev_matrix"), where)
    tensor_map = _whole_numbers(item.get("tensor_map"), where)
    shards = [item.get(f"opt_weight_shard_{key}", 0) for key in ("size", "step")]
    size, step = _whole_numbers(shards, where)
    return _layout(matrix, (tensor_map,), (size, step), where)


def _whole_numbers(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(n) is int for n in value):
        raise CheckpointError(f"{where}: expected whole numbers, found {str(value)[:60]}")
    return tuple(value)


def _layout(
    matrix: tuple[int, ...], maps: tuple[tuple[int, ...], ...], shards: tuple[int, int], where: str
) -> TensorLayout:
    # A damaged file must not make a world of any size.
    if not matrix or min(matrix) < 1 or prod(matrix) > _MOST_DEVICES:
        raise CheckpointError(f"{where}: {list(matrix)[:8]} is no matrix of devices")
    return TensorLayout(matrix, maps, *shards)


def _uneven(where: str, name: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: {name[:200]!r} has uneven manual slices (param_split_shape), which are not "
        "supported"
    )


def dump_strategy(stage: int, layouts: Layouts) -> bytes:
    """The strategy file of one stage, in the form of MindSpore's own functions."""
    return b"".join(_dumped(stage, layouts))


def _dumped(stage: int, layouts: Layouts) -> Iterator[bytes]:
    yield integer(1, 1)
    for name in sorted(layouts):
        strategies = integer(1, stage)
        yield message(2, message(1, f"Load_{name}".encode()) + message(2, strategies))
    for name in sorted(layouts):
        layout = layouts[name]
        content = message(1, packed(1, layout.device_matrix))
        content += b"".join(message(2, packed(1, dim_map)) for dim_map in layout.tensor_map)
        content += message(3, b"") + message(4, b"")  # MindSpore's reader takes the first of each
        content += integer(5, 0) + integer(6, layout.step) + integer(7, layout.num_shards)
        yield message(3, message(1, name.encode()) + message(2, content))


# The wire format of protocol buffers (https://protobuf.dev/programming-guides/encoding/).
Value = int | bytes
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_LONGEST_VARINT = 10  # of a varint: 64 bits by 7


def wire_fields(data: bytes, where: str) -> Iterator[tuple[int, Value]]:
    """The number and value of every field, in order. ``where`` names the file in errors."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at, where)
        number, kind = key >> 3, key & 7
        if not number or kind not in (_VARINT, _BYTES, *_FIXED):
            raise _damaged(where, at)
        if kind == _VARINT:
            value, at = _varint(data, at, where)
            yield number, value
            continue
        length, at = _varint(data, at, where) if kind == _BYTES else (_FIXED[kind], at)
        if at + length > len(data):
            raise _damaged(where, at)
        yield number, data[at : at + length]
        at += length


def integers(values: Sequence[Value], where: str) -> tuple[int, ...]:
    """A repeated field of signed integers, packed or not."""
    numbers: list[int] = []
    for value in values:
        if isinstance(value, int):
            numbers.append(_signed(value))
            continue
        at = 0
        while at < len(value):
            number, at = _varint(value, at, where)
            numbers.append(_signed(number))
    return tuple(numbers)


def integer(number: int, value: int) -> bytes:
    """A field of one integer."""
    return _encoded(number << 3 | _VARINT) + _encoded(value)


def packed(number: int, values: Sequence[int]) -> bytes:
    """A field of several integers."""
    return message(number, b"".join(map(_encoded, values)))


def message(number: int, content: bytes) -> bytes:
    """A field of bytes: text, or a message."""
    return _encoded(number << 3 | _BYTES) + _encoded(len(content)) + content


def _varint(data: bytes, at: int, where: str) -> tuple[int, int]:
    value = 0
    for i, byte in enumerate(data[at : at + _LONGEST_VARINT]):
        value |= (byte & 127) << 7 * i
        if byte < 128:
            # Ten groups of 7 bits are 70; as in protocol buffers, those beyond 64 do not count.
            return value & (1 << 64) - 1, at + i + 1
    raise _damaged(where, at)


def _encoded(value: int) -> bytes:
    remaining, encoded = value & (1 << 64) - 1, bytearray()
    while remaining > 127:
        encoded.append(remaining & 127 | 128)
        remaining >>= 7
    encoded.append(remaining)
    return bytes(encoded)


def _signed(value: int) -> int:
    # The -1 of a tensor map is written as 64 ones.
    return value - (1 << 64) if value >> 63 else value


def _damaged(where: str, at: int) -> CheckpointError:
    return CheckpointError(f"{where}: not a strategy file of MindSpore, or damaged at byte {at}")
