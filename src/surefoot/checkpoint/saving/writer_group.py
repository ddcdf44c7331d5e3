"""Write plan of a joint save: which boxes each rank owns, and which of them it writes.

Each rank sends the boxes of its tensors, and all compute the same plan. They send them again only
if they have changed since the last save; otherwise a digest of a few bytes is enough.

``balance`` assigns every element to exactly one rank that has it, so that all ranks write the same
number of bytes. It is pure arithmetic over the boxes that each rank has, so all ranks compute the
same result. Replicated boxes are divided among the ranks that have them. The boxes that the same
ranks have are one group: they are concatenated and split, so that at most one tensor per rank is
split, along its rows. How much of its group a rank takes depends on what the other groups give it,
so each group is divided again until nothing changes: the sum of squares of the loads falls with
every division, and is least where the fullest rank has as little as it can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import CheckpointError, counted
from ...parallel.box import Box, is_covered_once
from ...storage.files import digest
from ..disk.commit import new_nonce
from ..disk.manifest import Layout
from ..disk.tensorfile import Tensors, num_bytes


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """The box of one tensor that one rank has."""

    dtype: str  # safetensors' name for it
    shape: tuple[int, ...]  # of the whole tensor
    box: Box

    @property
    def num_bytes(self) -> int:
        """Of the box."""
        return num_bytes(self.dtype, self.box.shape)


Exchange = Callable[[Any], list[Any]]  # what every process has passed to it, in order of rank
Broadcast = Callable[[Any], Any]  # what rank 0 has passed to it
Holding = Mapping[str, Mapping[str, LocalTensor]]  # role -> name -> what a process holds


@dataclass(frozen=True)
class SavePlan:
    """The plan that all ranks have computed alike."""

    tensors: Mapping[str, Tensors]  # by role: the type and whole shape of each, of all processes
    mine: Mapping[str, Mapping[str, Box]]  # by role and name: what this process writes
    optimizers: Mapping[str, Mapping[str, Any]]  # by role: states without tensors, of all processes


@dataclass(frozen=True)
class WriterGroup:
    """The ranks of a joint save, as one of them sees them, and how they communicate."""

    layout: Layout = "full"
    rank: int = 0
    size: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)
    exchange: Exchange = lambda said: [said]
    from_first: Broadcast = lambda value: value  # waits for rank 0 as long as a save takes
    _plans: dict[tuple[str, ...], SavePlan] = field(
        default_factory=dict, repr=False, compare=False
    )  # the last one, by the digests of what each rank has

    def agree(
        self, held: Holding, optimizers: Mapping[str, Mapping[str, Any]], parent: str | None
    ) -> tuple[str, str | None, SavePlan]:
        """Exchange which boxes each rank has; a collective call. Raises on every rank if these do
        not fit together.

        ``optimizers`` are states without tensors, in a pipeline of some parameters only. Returns
        rank 0's nonce of the temporary folder, its ``parent``, and the plan.
        """
        own_state = held, optimizers
        answers = self.exchange((digest(repr(own_state).encode()), new_nonce(), parent))
        digests = tuple(own_digest for own_digest, _, _ in answers)
        if digests not in self._plans:
            plan = _plan(self.exchange(own_state), self.rank)
            self._plans.clear()
            self._plans[digests] = plan
        _, nonce, parent = answers[0]
        return nonce, parent, self._plans[digests]


ALONE = WriterGroup()


def shared_out(held: Sequence[Holding]) -> list[dict[str, dict[str, Box]]]:
    """What each rank writes of the tensors of all, by role and name."""
    flat = [
        {f"{role}/{name}": one for role, found in tensors.items() for name, one in found.items()}
        for tensors in held
    ]
    shares: list[dict[str, dict[str, Box]]] = [{} for _ in held]
    for share, boxes in zip(shares, balance(flat), strict=True):
        for full_name, box in boxes.items():
            role, _, name = full_name.partition("/")
            share.setdefault(role, {})[name] = box
    return shares


def _plan(states_of_ranks: list[tuple[Holding, Mapping[str, Any]]], rank: int) -> SavePlan:
    mine = shared_out([tensors for tensors, _ in states_of_ranks])[rank]
    whole: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    optimizers: dict[str, dict[str, Any]] = {}
    for tensors, states in states_of_ranks:
        for role, local_tensors in tensors.items():
            for name, tensor in local_tensors.items():
                whole.setdefault(role, {}).setdefault(name, (tensor.dtype, tensor.shape))
        for role, state in states.items():
            merged = optimizers.setdefault(role, {})
            merged |= {name: slots for name, slots in state.items() if name not in merged}
    return SavePlan(whole, mine, optimizers)


PASSES = 100  # over all groups, at most; a few suffice unless groups form a ring
SLACK = 0.01  # of what one process is to write: what a cut may miss to spare a tensor


Holdings = Sequence[Mapping[str, LocalTensor]]  # by rank, then by name
Holders = tuple[int, ...]  # ranks


def balance(holdings: Holdings) -> list[dict[str, Box]]:
    """The box of each tensor that each rank writes, by name; most tensors are written by few ranks.

    A tensor without dimensions or elements is written by the first rank that has it.

    Raises ``CheckpointError`` if the boxes of a tensor do not cover it, or overlap without being
    equal.
    """
    found: list[dict[str, Box]] = [{} for _ in holdings]
    loads = [0] * len(holdings)
    groups: dict[Holders, list[tuple[str, LocalTensor]]] = {}
    for name, boxes in _holders(holdings).items():
        _check(name, boxes)
        for held, ranks in boxes.items():
            writers = ranks if held.box.shape and held.box.size else ranks[:1]
            groups.setdefault(writers, []).append((name, held))
    # The fewest holders come first, because they leave the least choice.
    groups = {ranks: groups[ranks] for ranks in sorted(groups, key=lambda r: (len(r), r))}
    plan = _byte_shares(
        {ranks: sum(held.num_bytes for _, held in groups[ranks]) for ranks in groups}, loads
    )
    for ranks, items in groups.items():
        _take_back(plan[ranks], ranks, loads)  # what was cut otherwise than planned is made good
        _deal(items, ranks, loads, found)
    return found


def _byte_shares(sizes: Mapping[Holders, int], loads: list[int]) -> dict[Holders, list[int]]:
    """How many bytes of each group each of its ranks takes; they are added to ``loads``."""
    found = {ranks: [0] * len(ranks) for ranks in sizes}
    for _ in range(PASSES):
        before = {**found}
        for ranks, size in sizes.items():
            _take_back(found[ranks], ranks, loads)
            found[ranks] = _shares(size, [loads[rank] for rank in ranks])
            for rank, share in zip(ranks, found[ranks], strict=True):
                loads[rank] += share
        if found == before:
            break
    return found


def _take_back(shares: Sequence[int], ranks: Holders, loads: list[int]) -> None:
    for rank, share in zip(ranks, shares, strict=True):
        loads[rank] -= share


def _holders(holdings: Holdings) -> dict[str, dict[LocalTensor, Holders]]:
    """The different boxes of each tensor, and the ranks that have them, without empty boxes."""
    found: dict[str, dict[LocalTensor, Holders]] = {}
    for rank, tensors in enumerate(holdings):
        for name, held in tensors.items():
            boxes = found.setdefault(name, {})
            whole = Box.whole(held.shape)
            one = held if whole.size else LocalTensor(held.dtype, held.shape, whole)
            if held.box.size or not whole.size:
                boxes[one] = (*boxes.get(one, ()), rank)
    return found


def _check(name: str, boxes: Mapping[LocalTensor, Holders]) -> None:
    kinds = {(held.dtype, held.shape) for held in boxes}
    if len(kinds) > 1:
        (a, shape_a), (b, shape_b), *_ = sorted(kinds)
        raise CheckpointError(
            f"{name}: ranks have different tensors of that name, {a} {list(shape_a)} and {b} "
            f"{list(shape_b)}"
        )
    shapes = {held.shape for held in boxes}
    if not shapes or not is_covered_once(Box.whole(*shapes), [held.box for held in boxes]):
        parts = ", ".join(f"{list(h.box.start)}+{list(h.box.shape)}" for h in list(boxes)[:4])
        raise CheckpointError(
            f"{name}: the boxes of all ranks do not cover it exactly once ({parts}, "
            f"{counted(len(boxes), 'box', 'boxes')} in total)"
        )


def _deal(
    items: Sequence[tuple[str, LocalTensor]],
    ranks: Holders,
    loads: list[int],
    found: list[dict[str, Box]],
) -> None:
    """Divide ``items``, which all of ``ranks`` have, among them; both lists are extended."""
    shares = _shares(sum(held.num_bytes for _, held in items), [loads[rank] for rank in ranks])
    takers = [(rank, share) for rank, share in zip(ranks, shares, strict=True) if share]
    rank, share = takers.pop(0) if takers else (ranks[0], 0)
    end, dealt = share, 0  # of the line on which all items lie
    for name, held in items:
        rest: Box | None = held.box
        while rest is not None:
            size, room, slack = num_bytes(held.dtype, rest.shape), end - dealt, SLACK * share
            part: Box | None = rest
            rest = None
            if part is not None and takers and size > room + slack:
                part, rest = _divided(part, room / size, slack / size)
            if part is not None:
                found[rank][name] = part
                given = num_bytes(held.dtype, part.shape)
                dealt, loads[rank] = dealt + given, loads[rank] + given
            if rest is not None:
                rank, share = takers.pop(0)
                end += share


def _divided(box: Box, wanted: float, tolerance: float) -> tuple[Box | None, Box | None]:
    """About ``wanted`` of ``box`` along the first dimension that is fine enough, and the rest."""
    if wanted <= tolerance:
        return None, box

    def count(dim: int) -> int:
        return round(box.shape[dim] * wanted)

    def is_fine(dim: int) -> bool:
        return abs(count(dim) / box.shape[dim] - wanted) <= tolerance

    dims = range(len(box.shape))
    dim = next(filter(is_fine, dims), max(dims, key=lambda dim: box.shape[dim]))
    if not 0 < (first := count(dim)) < box.shape[dim]:
        return (box, None) if first else (None, box)
    before, after = box.shape[:dim], box.shape[dim + 1 :]
    rest = (*box.start[:dim], box.start[dim] + first, *box.start[dim + 1 :])
    return (
        Box(box.start, (*before, first, *after)),
        Box(rest, (*before, box.shape[dim] - first, *after)),
    )


def _shares(total: int, loads: Sequence[int]) -> list[int]:
    """How much of ``total`` each takes so that all end as equal as possible."""
    level, filled = 0, sorted(loads)
    for count in range(1, len(filled) + 1):
        level = -(-(total + sum(filled[:count])) // count)
        if count == len(filled) or level <= filled[count]:
            break
    left, found = total, []
    for load in loads:
        found.append(min(left, max(0, level - load)))
        left -= found[-1]
    return found
