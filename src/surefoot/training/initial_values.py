"""The trained weights as they were before the first step, to compute with them in a window: a
reference needs no second model, whatever the method trains.

They are kept on the host, and change places with the current ones while they are computed with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..network.network import Network
from ..parallel.sharded_model import gather_nothing


@dataclass
class InitialValues:
    """This rank's share of the trainable weights of ``network``, as they are now."""

    network: Network
    _values: Mapping[str, torch.Tensor] = field(init=False)
    _is_in_place: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        named = self.network.named.items()
        self._values = {name: _local(p).cpu().clone() for name, p in named}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While it lasts, the network has these values."""
        assert not self._is_in_place
        self._exchange()
        self._is_in_place = True
        try:
            yield
        finally:
            self._exchange()
            self._is_in_place = False

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swap them, one tensor at a time; nothing stays gathered of other values."""
        gather_nothing(self.network.module)
        for name, parameter in self.network.named.items():
            here, kept = _local(parameter), self._values[name]
            current = here.cpu().clone()
            here.copy_(kept)
            kept.copy_(current)


def _local(parameter: nn.Parameter) -> torch.Tensor:
    values = parameter.detach()
    return values.to_local() if isinstance(values, DTensor) else values
