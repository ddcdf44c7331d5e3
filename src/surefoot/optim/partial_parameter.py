"""A matrix of which each update changes some entries: these are a parameter of their own.

The optimizer has the entries, not the matrix, so its state, and what is kept of the gradient, are
of their size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .entries import EntryTurns
from .rules.sharded import local, part_of


class PartialParameter:
    """The trained entries of ``weight`` in one turn after the other. After each micro-batch they
    take over their part of the gradient, and the rest of it is freed."""

    def __init__(self, name: str, weight: nn.Parameter, turns: EntryTurns) -> None:
        shape = turns.shape(name, tuple(weight.shape))
        here = local(weight)
        values = torch.zeros(*here.shape[:-1], shape[-1], dtype=here.dtype, device=here.device)
        self.weight, self.entries = weight, nn.Parameter(_sharded_like(weight, values))
        self.order, self.shifts = _drawn(name, weight, turns)
        self.start = 0  # of the turn, in the order of columns
        weight.register_post_accumulate_grad_hook(self._keep_gradient)  # type: ignore[no-untyped-call]

    def begin(self, turn: int) -> None:
        """Train the entries of ``turn``: after those of the turn before, and around."""
        self.start = turn * self.entries.shape[-1] % len(self.order)
        self.entries.grad = None

    @torch.no_grad()
    def before_step(self, *_: object) -> None:
        """Copy the values of the entries out of the matrix."""
        local(self.entries).copy_(local(self.weight).gather(-1, self._columns()))

    @torch.no_grad()
    def after_step(self, *_: object) -> None:
        """Copy the values of the entries into the matrix."""
        local(self.weight).scatter_(-1, self._columns(), local(self.entries))

    @torch.no_grad()
    def _keep_gradient(self, weight: torch.Tensor) -> None:
        assert weight.grad is not None
        kept = local(weight.grad).gather(-1, self._columns())
        weight.grad = None
        if self.entries.grad is None:
            self.entries.grad = _sharded_like(self.weight, kept)
        else:
            local(self.entries.grad).add_(kept)

    def _columns(self) -> torch.Tensor:
        """The columns of the entries of each row of this rank's part."""
        width, rows = self.entries.shape[-1], local(self.weight).shape[:-1]
        places = torch.arange(width, device=self.order.device) + self.start
        return self.order[(places + self.shifts) % len(self.order)].expand(*rows, width)


def partial_parameters(
    named: Mapping[str, nn.Parameter], turns: EntryTurns | None
) -> dict[str, PartialParameter]:
    """Those of ``named`` of which ``turns`` trains some entries at a time."""
    if turns is None:
        return {}
    return {
        name: PartialParameter(name, weight, turns)
        for name, weight in named.items()
        if turns.shape(name, tuple(weight.shape)) != tuple(weight.shape)
    }


def _drawn(name: str, weight: torch.Tensor, turns: EntryTurns) -> tuple[torch.Tensor, torch.Tensor]:
    """The order in which columns are trained, and where each row of this rank begins in it. The CPU
    draws them, so that they are the same for every device and mesh."""
    device, width = local(weight).device, weight.shape[-1]
    if not turns.is_scattered:
        none = torch.zeros((1,) * weight.ndim, dtype=torch.int64, device=device)
        return torch.arange(width, device=device), none
    digest = hashlib.blake2b(f"{turns.seed} {name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
    order = torch.randperm(width, generator=generator)
    shifts = torch.randint(width, (*weight.shape[:-1], 1), generator=generator)
    return order.to(device), part_of(shifts.to(device), weight)


def _sharded_like(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """This rank's ``values`` as a tensor that is sharded as ``weight`` is, along all dimensions but
    the last."""
    if not isinstance(weight, DTensor):
        return values
    whole = torch.empty((*weight.shape[:-1], values.shape[-1]), device="meta")
    mesh, placements = weight.device_mesh, weight.placements
    made: DTensor = DTensor.from_local(
        values, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made
