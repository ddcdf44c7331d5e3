"""Point-to-point communication between pipeline stages: hidden states forward, gradients backward.

Every rank knows each micro-batch of the window, and so the shape of each tensor; only the dtype is
sent, once, before the first tensor. So rows may have any lengths.

The tensors of each direction have a process group of their own. NCCL delivers in order within one
group, and two ranks that both send first would wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from ..world import World

Direction = Literal["forward", "backward"]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_Route = tuple[Direction, bool]  # the second: between the last process and the first


@dataclass(frozen=True)
class Arrival:
    """A tensor that this rank is receiving."""

    tensor: torch.Tensor
    work: dist.Work

    def wait(self) -> torch.Tensor:
        """The tensor, once it has arrived."""
        self.work.wait()
        return self.tensor


@dataclass
class Links:
    """The other ranks of this rank's pipeline. Stage s is on rank s mod ``size``."""

    ranks: Sequence[int]  # of the pipeline's processes, in the order of their stages
    place: int  # of this process among them
    num_stages: int
    device: torch.device
    groups: dict[_Route, dist.ProcessGroup]
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)  # of what enters each stage
    _sent: deque[tuple[dist.Work, torch.Tensor]] = field(default_factory=deque)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def enter(self, hidden: torch.Tensor, stage: int) -> None:
        """Send the input of ``stage`` to its rank."""
        if stage not in self.dtypes:
            self.dtypes[stage] = hidden.dtype
            told = torch.tensor([_DTYPES.index(hidden.dtype)], device=self.device)
            self._send(told, stage, "forward")
        self._send(hidden.detach(), stage, "forward")

    def entering(self, shape: Sequence[int], stage: int) -> Arrival:
        """The input of ``stage``, which is on this rank."""
        if stage not in self.dtypes:
            told = torch.empty(1, dtype=torch.int64, device=self.device)
            self._receive(told, stage, "forward").wait()
            self.dtypes[stage] = _DTYPES[int(told)]
        hidden = torch.empty(tuple(shape), dtype=self.dtypes[stage], device=self.device)
        return self._receive(hidden, stage, "forward")

    def give_back(self, gradient: torch.Tensor, stage: int) -> None:
        """Send the gradient of the input of ``stage`` to the rank that sent the input."""
        self._send(gradient, stage, "backward")

    def given_back(self, output: torch.Tensor, stage: int) -> Arrival:
        """The gradient of ``output``, which was the input of ``stage``."""
        gradient = torch.empty_like(output, memory_format=torch.contiguous_format)
        return self._receive(gradient, stage, "backward")

    def flush(self) -> None:
        """Wait until everything that was sent has arrived."""
        self._wait_for_all_but(0)

    def _send(self, tensor: torch.Tensor, stage: int, direction: Direction) -> None:
        # The tensor is kept until it has arrived; older ones have by now (tests/parallel/
        # test_schedule.py), so that nobody waits here.
        self._wait_for_all_but(2 * self.num_stages)
        tensor, group = tensor.contiguous(), self.groups[direction, stage % self.size == 0]
        other = self.ranks[(stage if direction == "forward" else stage - 1) % self.size]
        work = dist.isend(tensor, other, group=group)
        assert work is not None
        self._sent.append((work, tensor))

    def _receive(self, into: torch.Tensor, stage: int, direction: Direction) -> Arrival:
        other = self.ranks[(stage - 1 if direction == "forward" else stage) % self.size]
        work = dist.irecv(into, other, group=self.groups[direction, stage % self.size == 0])
        assert work is not None
        return Arrival(into, work)

    def _wait_for_all_but(self, count: int) -> None:
        while len(self._sent) > count:
            self._sent.popleft()[0].wait()


def pipelines(world: World) -> list[list[int]]:
    """The ranks of each pipeline."""
    assert world.mesh is not None
    rows: list[list[int]] = world.mesh.mesh.flatten(1).T.tolist()
    return rows


def connect(world: World, *, num_parts: int, device: torch.device, timeout_minutes: float) -> Links:
    """The links of this rank. A collective call."""
    timeout = timedelta(minutes=timeout_minutes)
    routes: list[_Route] = [("forward", False), ("backward", False)]
    if num_parts > 1:
        routes += [("forward", True), ("backward", True)]
    for ranks in pipelines(world):
        made = {route: dist.new_group(ranks, timeout=timeout) for route in routes}
        if world.rank in ranks:
            mine, groups = ranks, made
    return Links(mine, world.pp_rank, num_parts * world.pp, device, groups)
