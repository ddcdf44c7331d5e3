"""Checkpoint state of a pipeline rank: it has the names of the full model, with meta tensors where
other ranks own the layers.

Tensors of other stages have a name and a shape but no values: they are neither written nor read
here. So every rank checks all names, and rank 0 writes a record of all tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from ...parallel.sharding import Cuts
from ..disk.manifest import Kind
from .protocols import ShardedState

Tensors = Mapping[str, torch.Tensor]


class Exchange(Protocol):
    """How the ranks of a pipeline communicate."""

    def of_stages(self, value: Any) -> list[Any]:
        """The objects of all ranks, in the order of their stages."""


@dataclass(frozen=True)
class PipelinedWeights:
    """The weights of some pipeline stages."""

    own: ShardedState
    model: nn.Module
    elsewhere: Tensors  # on the meta device
    copies: Collection[str]  # names of what an earlier stage has as well, which then writes it
    second: Mapping[str, str]  # name in files of what is tied to it here: its name in the model
    exchange: Exchange
    kind: Kind
    small_files: Callable[..., dict[str, bytes]]  # beside the weights
    is_converted: ClassVar[bool] = False

    @property
    def is_adapter(self) -> bool:
        """Whether the files contain an adapter, not a model."""
        return self.kind == "adapter"

    def cuts_of(self, name: str) -> Cuts | None:
        """The sharding of a tensor; None if it is not recorded."""
        return self.own.cuts_of(name)

    def is_copy(self, name: str) -> bool:
        """Whether another rank writes this tensor."""
        return name in self.copies

    def like(self, name: str) -> torch.Tensor | None:
        """None: all names are there from the beginning."""
        return None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All names; the live tensors of this rank."""
        return {**self.elsewhere, **self.own.state_dict(), **self._second()}

    def _second(self) -> dict[str, torch.Tensor]:
        found = {name: self.model.get_parameter(here) for name, here in self.second.items()}
        return {name: parameter.detach() for name, parameter in found.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Tensors) -> None:
        """Load this rank's tensors from ``state``."""
        for name, tensor in self._second().items():
            tensor.copy_(state[name])
        theirs = self.elsewhere.keys() | self.second.keys()
        self.own.load_state_dict({n: tensor for n, tensor in state.items() if n not in theirs})


@dataclass(frozen=True)
class PipelinedOptimizer:
    """The optimizer state of some pipeline stages: ``{parameter: {slot: tensor}}``."""

    own: ShardedState
    elsewhere: Collection[str]  # parameters
    copies: Collection[str]
    exchange: Exchange

    def cuts_of(self, pointer: str) -> Cuts | None:
        """The sharding of a tensor of the state."""
        return self.own.cuts_of(pointer)

    def is_copy(self, pointer: str) -> bool:
        """Whether another rank writes this tensor."""
        return pointer.rpartition(".")[0] in self.copies

    def like(self, pointer: str) -> torch.Tensor | None:
        """A tensor that does not exist yet; on the meta device if never on this rank."""
        if pointer.rpartition(".")[0] in self.elsewhere:
            return torch.empty((), device="meta")
        return self.own.like(pointer)

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """The live tensors, and the names of all ranks: a collective call."""
        own: dict[str, dict[str, torch.Tensor]] = self.own.state_dict()
        slots = {name: [*tensors] for name, tensors in own.items()}
        theirs = {n: s for part in self.exchange.of_stages(slots) for n, s in part.items()}
        empty = torch.empty((), device="meta")
        return {name: own.get(name) or dict.fromkeys(theirs[name], empty) for name in theirs}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Load this rank's tensors from ``state``."""
        self.own.load_state_dict({n: dict(s) for n, s in state.items() if n not in self.elsewhere})


def owners(exchange: Exchange, names: Iterable[str]) -> list[set[str]]:
    """The names that each rank of a pipeline is the first to have, given those of this rank."""
    seen: set[str] = set()
    found = []
    for theirs in exchange.of_stages(list(names)):
        found.append(set(theirs) - seen)
        seen |= set(theirs)
    return found
