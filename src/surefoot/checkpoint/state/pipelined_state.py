"""States of a process that runs some stages of a model only, as states of the whole model.

What other stages have is there by name and shape, as tensors on the meta device: without values,
neither written nor read here. So every process checks all names, and the first one writes a record
of all tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ...geometry.sharding import Cuts
from .states import Stateful, cuts_of

Tensors = Mapping[str, torch.Tensor]


class Exchange(Protocol):
    """What the processes of a pipeline tell each other."""

    def of_stages(self, value: Any) -> list[Any]:
        """What each of them has, in the order of their stages."""


@dataclass(frozen=True)
class PipelinedWeights:
    """The weights of some stages."""

    own: Stateful
    model: nn.Module
    elsewhere: Tensors  # on the meta device
    copies: Collection[str]  # names of what an earlier stage has as well, which then writes it
    second: Mapping[str, str]  # name in files of what is tied to it here: its name in the model
    exchange: Exchange

    def cuts_of(self, name: str) -> Cuts | None:
        """The sharding of a tensor; None if it is not recorded."""
        return cuts_of(self.own, name)

    def is_copy(self, name: str) -> bool:
        """Whether another process writes this tensor."""
        return name in self.copies

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All names; the live tensors of those that are here."""
        return {**self.elsewhere, **self.own.state_dict(), **self._second()}

    def _second(self) -> dict[str, torch.Tensor]:
        found = {name: self.model.get_parameter(here) for name, here in self.second.items()}
        return {name: parameter.detach() for name, parameter in found.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Tensors) -> None:
        """Take from ``state`` what is here."""
        for name, tensor in self._second().items():
            tensor.copy_(state[name])
        theirs = self.elsewhere.keys() | self.second.keys()
        self.own.load_state_dict({n: tensor for n, tensor in state.items() if n not in theirs})


@dataclass(frozen=True)
class PipelinedOptimizer:
    """The state of an optimizer of what learns in some stages: ``{parameter: {slot: tensor}}``."""

    own: Stateful
    elsewhere: Collection[str]  # parameters
    copies: Collection[str]
    exchange: Exchange

    def cuts_of(self, pointer: str) -> Cuts | None:
        """How a tensor of the state is cut over processes."""
        return cuts_of(self.own, pointer)

    def is_copy(self, pointer: str) -> bool:
        """Whether another process writes this tensor."""
        return pointer.rpartition(".")[0] in self.copies

    def like(self, pointer: str) -> torch.Tensor | None:
        """A tensor of the state that is not there yet; on the meta device if it never will be."""
        if pointer.rpartition(".")[0] in self.elsewhere:
            return torch.empty((), device="meta")
        like: Callable[[str], torch.Tensor | None] = self.own.like  # type: ignore[attr-defined]
        return like(pointer)

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """All parameters; the live tensors of those that are here. The processes of a pipeline call
        this together: which slots there are is known to the one that has made them."""
        own: dict[str, dict[str, torch.Tensor]] = self.own.state_dict()
        slots = {name: [*tensors] for name, tensors in own.items()}
        theirs = _merged(self.exchange.of_stages(slots))
        empty = torch.empty((), device="meta")
        return {name: own.get(name) or dict.fromkeys(theirs[name], empty) for name in theirs}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take from ``state`` what is here. Raises ``CheckpointError`` as the optimizer's own."""
        self.own.load_state_dict({n: dict(s) for n, s in state.items() if n not in self.elsewhere})


def owners(exchange: Exchange, names: Iterable[str]) -> list[set[str]]:
    """The names that each process of a pipeline is the first to have, given this one's."""
    seen: set[str] = set()
    found = []
    for theirs in exchange.of_stages(list(names)):
        found.append(set(theirs) - seen)
        seen |= set(theirs)
    return found


def _merged(parts: Iterable[Mapping[str, list[str]]]) -> dict[str, list[str]]:
    return {name: slots for part in parts for name, slots in part.items()}
