"""The grid of a checkpoint of many ranks: which box of each tensor each rank has written. No torch.

A rule says over which axes of the mesh a tensor is sharded, and in which order, always as by
``torch.chunk``. So the box of a rank, and the ranks of a box, follow by arithmetic, and a
manifest needs an entry for each tensor instead of one for each tensor and rank.

The hashes of a rank's boxes are in its hash list, a file beside its files of tensors. The hash of
the list is in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from ...errors import CheckpointError
from ...parallel.sharding import AxisShard, Box, chunk, local_offset_and_shape
from .tensorfile import ITEM_SIZES, is_size, sizes

RANK_FOLDER = "rank_{:05d}"  # of layout distributed
HASH_LIST = f"{RANK_FOLDER}/hashes.json"
BLOCK = 64 << 10  # bytes of a piece that have a hash of their own, if the piece is larger
STAGES = "pp"  # the axis that shards no tensor: each is on one stage
_MOST_AXES = 8
_MOST_RANKS = 65_536  # their folders have five digits
_FIELDS = ("cuts", "dtype", "shape", "stage", "tensor")


@dataclass(frozen=True, slots=True)
class ShardingRule:
    """How one tensor is divided among the ranks of its stage."""

    tensor: str  # "ROLE/...", as in a piece
    dtype: str  # safetensors' name for it
    shape: tuple[int, ...]  # of the whole tensor
    cuts: tuple[AxisShard, ...]  # in the order in which they were made
    stage: int = 0  # the coordinate on the axis ``pp``


@dataclass(frozen=True)
class Grid:
    """The mesh of the ranks, and the rule of each tensor. A rank's number is its position on the
    mesh in row-major order.

    Of the ranks along an axis that does not shard a tensor, only the first one has its box.
    """

    axes: Mapping[str, int]  # name -> size, the outermost first
    rules: Sequence[ShardingRule]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.axes.values())

    @cached_property
    def rule_of(self) -> Mapping[str, ShardingRule]:
        """The rules by tensor."""
        return {rule.tensor: rule for rule in self.rules}

    def boxes_of(self, rank: int) -> dict[str, Box]:
        """What ``rank`` has written: a box of each tensor of which it has elements; of a tensor
        without elements, the first rank of its stage has the empty box."""
        place = place_of(rank, self.axes)
        kinds: dict[tuple[tuple[int, ...], tuple[AxisShard, ...]], Box | None] = {}
        boxes = {}
        for rule in self.rules:
            if rule.stage != place.get(STAGES, 0):
                continue
            kind = rule.shape, rule.cuts  # a large model has thousands of tensors of a few kinds
            if kind not in kinds:
                kinds[kind] = self._box(rule, place)
            if (box := kinds[kind]) is not None:
                boxes[rule.tensor] = box
        return boxes

    def _box(self, rule: ShardingRule, place: Mapping[str, int]) -> Box | None:
        cut = {cut.axis for cut in rule.cuts}
        if any(place[axis] for axis in self.axes if axis != STAGES and axis not in cut):
            return None
        box = Box(*local_offset_and_shape(rule.shape, rule.cuts, self.axes, place))
        return box if box.size or not prod(rule.shape) else None

    def ranks_of(self, rule: ShardingRule, box: Box) -> Iterator[tuple[int, Box]]:
        """The ranks that have elements of ``box``, and all of their box: the inverse of
        ``boxes_of``. A tensor without elements is that of the first rank of its stage."""
        if prod(rule.shape) and not box.size:
            return
        found = [({STAGES: rule.stage}, Box.whole(rule.shape))]
        for cut in rule.cuts:
            found = [
                ({**place, cut.axis: index}, part)
                for place, whole in found
                for index, part in self._chunks(whole, cut, box)
            ]
        for place, part in found:
            rank = 0
            for axis, size in self.axes.items():
                rank = rank * size + place.get(axis, 0)
            yield rank, part

    def _chunks(self, whole: Box, cut: AxisShard, box: Box) -> Iterator[tuple[int, Box]]:
        """The chunks of ``whole`` that have elements of ``box``, with their coordinate."""
        dim, count = cut.dim, self.axes[cut.axis]
        first, length = whole.start[dim], whole.shape[dim]
        low, high = max(box.start[dim], first), min(box.stop[dim], first + length)
        if low >= high:
            return
        size = -(-length // count)
        for index in range((low - first) // size, (high - 1 - first) // size + 1):
            begin, number = chunk(length, count, index)
            start = (*whole.start[:dim], first + begin, *whole.start[dim + 1 :])
            yield index, Box(start, (*whole.shape[:dim], number, *whole.shape[dim + 1 :]))

    def dump(self) -> dict[str, Any]:
        """The grid in the form of the manifest, which has the sizes of the axes in ``mesh``."""
        return {
            "axes": [*self.axes],
            "rules": [
                {
                    "cuts": [[cut.axis, cut.dim] for cut in rule.cuts],
                    "dtype": rule.dtype,
                    "shape": list(rule.shape),
                    "stage": rule.stage,
                    "tensor": rule.tensor,
                }
                for rule in self.rules
            ],
        }


def place_of(rank: int, axes: Mapping[str, int]) -> dict[str, int]:
    """The coordinate of ``rank`` on each axis."""
    place = {}
    for axis, size in reversed([*axes.items()]):
        rank, place[axis] = divmod(rank, size)
    return place


def parse_grid(raw: Mapping[str, Any], mesh: Mapping[str, int], where: str) -> Grid:
    """The grid of a manifest; a ``CheckpointError`` if its ``axes`` or ``rules`` are invalid.

    Rules that are valid cover each tensor exactly once: chunks divide what they are chunks of.
    """
    names, rules = raw.get("axes"), raw["rules"]
    if (
        not isinstance(names, list)
        or not all(isinstance(name, str) for name in names)
        or len({*names}) < len(names)
        or len(names) > _MOST_AXES
    ):
        raise CheckpointError(f"{where}: axes cannot be {str(names)[:80]!r}")
    if sorted(names) != sorted(mesh):
        raise CheckpointError(
            f"{where}: axes are {', '.join(names)[:80]}, but mesh has {', '.join(mesh)[:80]}"
        )
    axes = {name: mesh[name] for name in names}
    if not 1 <= prod(axes.values()) <= _MOST_RANKS:
        raise CheckpointError(f"{where}: mesh cannot be {str(axes)[:80]}")
    if not isinstance(rules, list):
        raise CheckpointError(f"{where}: rules cannot be {str(rules)[:80]!r}")
    parsed = [_parse_rule(rule, axes, f"{where}: rule {i}") for i, rule in enumerate(rules)]
    grid = Grid(axes, parsed)
    if len(grid.rule_of) < len(parsed):
        raise CheckpointError(f"{where}: a tensor has two rules")
    return grid


def _parse_rule(raw: object, axes: Mapping[str, int], where: str) -> ShardingRule:
    if not isinstance(raw, dict) or tuple(sorted(raw)) != _FIELDS:
        raise CheckpointError(f"{where}: expected the fields {', '.join(_FIELDS)}")
    tensor, dtype, stage = raw["tensor"], raw["dtype"], raw["stage"]
    if not isinstance(tensor, str) or not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise CheckpointError(f"{where}: no tensor {str(tensor)[:80]!r} of {str(dtype)[:40]!r}")
    if not is_size(stage) or stage >= axes.get(STAGES, 1):
        raise CheckpointError(f"{where}: the mesh has no stage {str(stage)[:40]}")
    shape = sizes(raw["shape"], f"{where}: shape")
    cuts = raw["cuts"]
    if not isinstance(cuts, list) or not all(_is_cut(cut, axes, shape) for cut in cuts):
        raise CheckpointError(
            f"{where}: cuts cannot be {str(cuts)[:80]}: expected pairs of an axis of the mesh and "
            f"a dimension of {list(shape)}"
        )
    if len({axis for axis, _ in cuts}) < len(cuts):
        raise CheckpointError(f"{where}: one axis shards it twice")
    return ShardingRule(tensor, dtype, shape, tuple(AxisShard(*cut) for cut in cuts), stage)


def _is_cut(raw: object, axes: Mapping[str, int], shape: tuple[int, ...]) -> bool:
    if not isinstance(raw, list) or len(raw) != 2 or not prod(shape):
        return False
    axis, dim = raw
    known = isinstance(axis, str) and axis in axes and axis != STAGES
    return known and is_size(dim) and dim < len(shape)


def num_blocks(size: int) -> int:
    """How many blocks of a piece of so many bytes have hashes of their own."""
    return 0 if size <= BLOCK else -(-size // BLOCK)
