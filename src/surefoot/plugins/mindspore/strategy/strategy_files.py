"""MindSpore's strategy files: how every tensor of a pipeline stage is sliced over its devices.

They are protocol buffers with the ending ``.ckpt``, or JSON. A merged file covers all stages, with
the stage's number as a prefix of the names. They contain no ranks and usually no shapes; the reader
must check that they fit the files beside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ....checkpoint.disk import strict_json
from ....errors import CheckpointError
from ....storage import files
from .slicing import TensorLayout
from .wire import Value, fields, integer, integers, message, packed

ENDINGS = (".ckpt", ".json")
FILE = "ckpt_strategy_rank_{}.ckpt"
_OF_RANK = re.compile(r".*_rank_(\d{1,6})\.(?:ckpt|json)")
_OF_STAGE = re.compile(r"(\d{1,6})-(.+)")
_MOST_BYTES = 256 << 20
_MOST_DEVICES = 1 << 20

Layouts = Mapping[str, TensorLayout]  # by a tensor's name


@dataclass(frozen=True)
class Strategy:
    """The layouts of every stage of a pipeline. All stages have as many devices."""

    stages: Sequence[Layouts]
    where: Path

    @property
    def num_devices(self) -> int:
        """Of one stage."""
        return next(layout.num_devices for own in self.stages for layout in own.values())

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
            found = [path / name for name in names]
        else:
            found = [path]
        if not found:
            raise CheckpointError(f"{path}: contains no strategy files (*.ckpt or *.json)")
        parsed = {file: _parse(file) for file in found}
    return _checked(_by_stage(parsed, path), path)


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
    for file, (stage, layouts) in parsed.items():
        named, at = _OF_RANK.fullmatch(file.name), stage
        if named and layouts:  # what it says of its stage may be missing
            at = int(named.group(1)) // next(iter(layouts.values())).num_devices
        merged = {name: _OF_STAGE.fullmatch(name) for name in layouts}
        if layouts and all(merged.values()) and not named:
            for name, match in merged.items():
                assert match is not None
                stages.setdefault(int(match[1]), {})[match[2]] = layouts[name]
            continue
        if stages.setdefault(at, layouts) != layouts:
            raise CheckpointError(
                f"{file}: differs from the files of the same pipeline stage ({at}) in {path}"
            )
    return stages


def _checked(stages: Mapping[int, Layouts], path: Path) -> Strategy:
    if not any(stages.values()):
        raise CheckpointError(f"{path}: it describes no tensors")
    if missing := sorted(set(range(max(stages) + 1)) - {s for s, own in stages.items() if own}):
        raise CheckpointError(f"{path}: the strategy of pipeline stage {missing[0]} is missing")
    sizes = {layout.num_devices for own in stages.values() for layout in own.values()}
    if len(sizes) > 1:
        told = " and ".join(map(str, sorted(sizes)[:2]))
        raise CheckpointError(f"{path}: tensors are on {told} devices; a stage has one number")
    return Strategy([stages[stage] for stage in sorted(stages)], path)


def _from_wire(data: bytes, where: str) -> tuple[int, dict[str, TensorLayout]]:
    stage, found = 0, {}
    for number, value in fields(data, where):
        if number == 2 and isinstance(value, bytes):
            stage = _stage(value, where)
        elif number == 3 and isinstance(value, bytes):
            name, layout = _item(value, where)
            found[name] = layout
    return stage, found


def _stage(item: bytes, where: str) -> int:
    """The stage in a ``ParallelStrategyItem``."""
    for number, value in fields(item, where):
        if number == 2 and isinstance(value, bytes):
            inner = dict(fields(value, where))
            stage = inner.get(1, 0)
            return stage if isinstance(stage, int) else 0
    return 0


def _item(item: bytes, where: str) -> tuple[str, TensorLayout]:
    """The name and layout in a ``ParallelLayoutItem``."""
    told = dict(fields(item, where))
    name, content = told.get(1, b""), told.get(2, b"")
    if not isinstance(name, bytes) or not isinstance(content, bytes):
        raise CheckpointError(f"{where}: not a strategy file of MindSpore")
    parts: dict[int, list[Value]] = {}
    for number, value in fields(content, where):
        parts.setdefault(number, []).append(value)
    repeated = {n: [_dims(value, where) for value in parts.get(n, ())] for n in (1, 2, 3, 4)}
    single = {n: (integers(parts.get(n, [0])[-1:], where) or (0,))[0] for n in (5, 6, 7)}
    text = name.decode("utf-8", "replace")
    if single[5] or any(repeated[3]) or any(repeated[4]):
        raise _uneven(where, text)
    matrix = repeated[1][0] if repeated[1] else ()
    return text, _layout(matrix, tuple(repeated[2]), (single[7], single[6]), f"{where}: {text}")


def _dims(value: Value, where: str) -> tuple[int, ...]:
    """The integers in a message whose only field they are."""
    if not isinstance(value, bytes):
        raise CheckpointError(f"{where}: not a strategy file of MindSpore")
    return integers([inner for number, inner in fields(value, where) if number == 1], where)


def _from_json(data: bytes, where: str) -> tuple[int, dict[str, TensorLayout]]:
    told = strict_json.parse_object(data, where)
    items, stages = told.get("parallel_layout_item"), told.get("parallel_strategy_item")
    if not isinstance(items, dict) or not all(isinstance(item, dict) for item in items.values()):
        raise CheckpointError(f"{where}: expected parallel_layout_item with an entry per tensor")
    first: object = next(iter(stages.values()), {}) if isinstance(stages, dict) else {}
    stage = first.get("stage", 0) if isinstance(first, dict) else 0
    return int(stage), {name: _of_json(name, item, where) for name, item in items.items()}


def _of_json(name: str, item: Mapping[str, Any], where: str) -> TensorLayout:
    if item.get("field") or item.get("param_split_shape") or item.get("indices_offset"):
        raise _uneven(where, name)
    here = f"{where}: {name}"
    matrix, own = (_whole_numbers(item.get(key), here) for key in ("dev_matrix", "tensor_map"))
    size, step = (item.get(f"opt_weight_shard_{key}", 0) for key in ("size", "step"))
    return _layout(matrix, (own,), _whole_numbers([size, step], here), here)  # type: ignore[arg-type]


def _whole_numbers(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(n) is int for n in value):
        raise CheckpointError(f"{where}: expected whole numbers, found {str(value)[:60]}")
    return tuple(value)


def _layout(
    matrix: tuple[int, ...], maps: tuple[tuple[int, ...], ...], shards: tuple[int, int], where: str
) -> TensorLayout:
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
        content += b"".join(message(2, packed(1, own)) for own in layout.tensor_map)
        content += message(3, b"") + message(4, b"")  # MindSpore's reader takes the first of each
        content += integer(5, 0) + integer(6, layout.step) + integer(7, layout.num_shards)
        yield message(3, message(1, name.encode()) + message(2, content))
