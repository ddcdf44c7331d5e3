"""Which boxes of tensors each rank of a joint save writes.

``balance`` assigns every element to exactly one rank that has it, so that all ranks write about the
same number of bytes. It is pure arithmetic over the boxes that each rank has, so all ranks compute
the same result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from ...errors import CheckpointError, counted
from ...parallel.sharding import Box, Cuts, is_covered_once
from ..disk.tensorfile import num_bytes


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """The box of one tensor that one rank has."""

    dtype: str  # safetensors' name for it
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    cuts: Cuts | None = field(default=None, compare=False, repr=False)
    """How it is sharded, if that may be a rule."""

    @property
    def num_bytes(self) -> int:
        """Of the box."""
        return num_bytes(self.dtype, self.box.shape)


Holding = Mapping[str, Mapping[str, LocalTensor]]  # role -> name -> what a process holds


def shared_out(holdings: Sequence[Holding]) -> list[dict[str, dict[str, Box]]]:
    """What each rank writes of the tensors of all, by role and name."""
    flat = [
        {f"{role}/{name}": t for role, tensors in holding.items() for name, t in tensors.items()}
        for holding in holdings
    ]
    shares: list[dict[str, dict[str, Box]]] = [{} for _ in holdings]
    for share, boxes in zip(shares, balance(flat), strict=True):
        for full_name, box in boxes.items():
            role, _, name = full_name.partition("/")
            share.setdefault(role, {})[name] = box
    return shares


FINE = 16  # what is at most 1/16 of a rank's share is not divided, and a cut misses by that at most


Holdings = Sequence[Mapping[str, LocalTensor]]  # by rank, then by name
Holders = tuple[int, ...]  # ranks


def balance(holdings: Holdings) -> list[dict[str, Box]]:
    """The box of each tensor that each rank writes, by name; most tensors are written by one rank.

    Boxes are assigned one after another: those with the fewest holders first, because they leave
    the least choice, and of these the largest first. A large one is divided among its holders so
    that they end level; any other goes to the holder with the least so far. A tensor without
    dimensions or elements is written by the first rank that has it.

    Raises ``CheckpointError`` if the boxes of a tensor do not cover it, or overlap without being
    equal.
    """
    boxes: list[tuple[str, LocalTensor, Holders]] = []
    for name, of_ranks in _holders(holdings).items():
        _check(name, of_ranks)
        boxes += [(name, tensor, ranks) for tensor, ranks in of_ranks.items()]
    # In this order few tensors are divided, and no search is needed. When a checksum of the name
    # chose one holder for each tensor, that of the largest wrote the most (docs/decisions/0027).
    boxes.sort(key=lambda entry: (len(entry[2]), -entry[1].num_bytes))
    largest_whole = sum(tensor.num_bytes for _, tensor, _ in boxes) / len(holdings) / FINE
    assigned: list[dict[str, Box]] = [{} for _ in holdings]
    loads = [0] * len(holdings)
    for name, tensor, ranks in boxes:
        loads_of_holders = [loads[rank] for rank in ranks]
        if not (tensor.box.shape and tensor.box.size):
            parts = [(0, tensor.box)]
        elif tensor.num_bytes > largest_whole:
            parts = _divided(tensor.box, _shares(tensor.num_bytes, loads_of_holders))
        else:
            parts = [(loads_of_holders.index(min(loads_of_holders)), tensor.box)]
        for place, box in parts:
            assigned[ranks[place]][name] = box
            loads[ranks[place]] += num_bytes(tensor.dtype, box.shape)
    return assigned


def _holders(holdings: Holdings) -> dict[str, dict[LocalTensor, Holders]]:
    """The different boxes of each tensor, and the ranks that have them, without empty boxes."""
    holders: dict[str, dict[LocalTensor, Holders]] = {}
    for rank, tensors in enumerate(holdings):
        for name, tensor in tensors.items():
            boxes = holders.setdefault(name, {})
            whole = Box.whole(tensor.shape)
            owned = tensor if whole.size else LocalTensor(tensor.dtype, tensor.shape, whole)
            if tensor.box.size or not whole.size:
                boxes[owned] = (*boxes.get(owned, ()), rank)
    return holders


def _check(name: str, boxes: Mapping[LocalTensor, Holders]) -> None:
    kinds = {(tensor.dtype, tensor.shape) for tensor in boxes}
    if len(kinds) > 1:
        (a, shape_a), (b, shape_b), *_ = sorted(kinds)
        raise CheckpointError(
            f"{name}: ranks have different tensors of that name, {a} {list(shape_a)} and {b} "
            f"{list(shape_b)}"
        )
    shapes = {tensor.shape for tensor in boxes}
    if not shapes or not is_covered_once(Box.whole(*shapes), [tensor.box for tensor in boxes]):
        parts = ", ".join(f"{list(h.box.start)}+{list(h.box.shape)}" for h in list(boxes)[:4])
        raise CheckpointError(
            f"{name}: the boxes of all ranks do not cover it exactly once ({parts}, "
            f"{counted(len(boxes), 'box', 'boxes')} in total)"
        )


def _divided(box: Box, shares: Sequence[int]) -> list[tuple[int, Box]]:
    """Parts of ``box`` of about these ``shares``, each with the place of its share: by rows, which
    are contiguous in a file, unless they are too few."""
    fine_enough = (dim for dim, size in enumerate(box.shape) if size >= FINE * len(shares))
    dim = next(fine_enough, max(range(len(box.shape)), key=lambda dim: box.shape[dim]))
    size, total = box.shape[dim], sum(shares)
    # Ends are rounded, not lengths, so that errors do not add up and no row is lost.
    ends = [0, *(round(size * end / total) for end in accumulate(shares))]
    parts = []
    for place, (first, last) in enumerate(pairwise(ends)):
        if first < last:
            start = (*box.start[:dim], box.start[dim] + first, *box.start[dim + 1 :])
            shape = (*box.shape[:dim], last - first, *box.shape[dim + 1 :])
            parts.append((place, Box(start, shape)))
    return parts


def _shares(total: int, loads: Sequence[int]) -> list[int]:
    """How much of ``total`` each takes so that all end as equal as possible."""
    level, filled = 0, sorted(loads)
    for count in range(1, len(filled) + 1):
        # As water fills a vessel: the `count` lowest loads rise to one
        # level, if the next is no lower.
        level = -(-(total + sum(filled[:count])) // count)
        if count == len(filled) or level <= filled[count]:
            break
    left, shares = total, []
    for load in loads:
        shares.append(min(left, max(0, level - load)))
        left -= shares[-1]
    return shares
