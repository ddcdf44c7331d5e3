"""Write plan of a joint save: which boxes each rank owns, and which of them it writes.

Each rank sends the boxes of its tensors, and all compute the same plan. They send them again only
if they have changed since the last save; otherwise a digest of a few bytes is enough.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...parallel.box import Box
from ...storage.files import digest
from ..disk.commit import new_nonce
from ..disk.file_plan import Tensors
from ..disk.manifest import Layout
from .load_balancing import LocalTensor, balance

Exchange = Callable[[Any], list[Any]]  # what every process has passed to it, in order of rank
Broadcast = Callable[[Any], Any]  # what rank 0 has passed to it
Holding = Mapping[str, Mapping[str, LocalTensor]]  # role -> name -> what a process holds


@dataclass(frozen=True)
class SavePlan:
    """The plan that all ranks have computed alike."""

    tensors: Mapping[str, Tensors]  # by role: the type and whole shape of each, of all processes
    mine: Mapping[str, Mapping[str, Box]]  # by role and name: what this process writes
    optimizers: Mapping[str, Mapping[str, Any]]  # by role: states without tensors, of all processes


@dataclass
class _Memory:
    """The last plan, and the digests of its inputs."""

    digests: tuple[str, ...] = ()
    plan: SavePlan | None = None


@dataclass(frozen=True)
class WriterGroup:
    """The ranks of a joint save, as one of them sees them, and how they communicate."""

    layout: Layout = "full"
    rank: int = 0
    size: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)
    exchange: Exchange = lambda said: [said]
    from_first: Broadcast = lambda value: value  # waits for rank 0 as long as a save takes
    _memory: _Memory = field(default_factory=_Memory, repr=False, compare=False)

    def agree(
        self, held: Holding, optimizers: Mapping[str, Mapping[str, Any]], parent: str | None
    ) -> tuple[str, str | None, SavePlan]:
        """Exchange which boxes each rank has; a collective call. Raises on every rank if these do
        not fit together.

        ``optimizers`` are states without tensors, in a pipeline of some parameters only. Returns
        rank 0's nonce of the temporary folder, its ``parent``, and the plan.
        """
        said = _said(held, optimizers)
        own = digest(json.dumps(said).encode())
        answers = self.exchange((own, new_nonce(), parent))
        digests = tuple(found for found, _, _ in answers)
        if self._memory.plan is None or digests != self._memory.digests:
            self._memory.plan = _plan([_heard(one) for one in self.exchange(said)], self.rank)
            self._memory.digests = digests
        _, nonce, parent = answers[0]
        return nonce, parent, self._memory.plan


ALONE = WriterGroup()


def _said(held: Holding, optimizers: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """The same as plain data; equal inputs have equal digests."""
    tensors = [
        (role, name, one.dtype, one.shape, one.box.start, one.box.shape)
        for role, tensors in held.items()
        for name, one in tensors.items()
    ]
    return tensors, optimizers


Heard = tuple[dict[str, dict[str, LocalTensor]], Mapping[str, Any]]


def _heard(said: tuple[Any, Mapping[str, Any]]) -> Heard:
    found: dict[str, dict[str, LocalTensor]] = {}
    for role, name, dtype, shape, start, extent in said[0]:
        box = Box(tuple(start), tuple(extent))
        found.setdefault(role, {})[name] = LocalTensor(dtype, tuple(shape), box)
    return found, said[1]


def shared_out(held: Sequence[Holding]) -> list[dict[str, dict[str, Box]]]:
    """What each rank writes of the tensors of all, by role and name (see ``load_balancing``)."""
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


def _plan(heard: list[Heard], rank: int) -> SavePlan:
    mine = shared_out([tensors for tensors, _ in heard])[rank]
    whole: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    optimizers: dict[str, dict[str, Any]] = {}
    for tensors, states in heard:
        for role, found in tensors.items():
            for name, one in found.items():
                whole.setdefault(role, {}).setdefault(name, (one.dtype, one.shape))
        for role, state in states.items():
            for name, slots in state.items():
                optimizers.setdefault(role, {}).setdefault(name, slots)
    return SavePlan(whole, mine, {role: optimizers.get(role, {}) for _, s in heard for role in s})
