"""The state of a torch optimizer under its parameters' names, which no order or grouping
changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError
from ..geometry.sharding import Cuts

State = Mapping[str, Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class NamedState:
    """``{parameter: {exp_avg: ..., exp_avg_sq: ..., step: ...}}`` of an optimizer whose groups have
    ``names``.

    Learning rate and other settings are not in it: they follow from the recipe and the step.
    """

    optimizer: torch.optim.Optimizer
    cuts: Mapping[str, Cuts] = field(default_factory=dict)  # of parameters spread over processes

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """The live tensors by parameter name; empty before the first step."""
        return {
            name: dict(self.optimizer.state[parameter])
            for group in self.optimizer.param_groups
            for name, parameter in zip(group["names"], group["params"], strict=True)
            if parameter in self.optimizer.state
        }

    def like(self, pointer: str) -> torch.Tensor | None:
        """A tensor of the state that is not there yet, cut over processes as its parameter is;
        None if it is not cut."""
        name, _, key = pointer.rpartition(".")
        parameter = self._parameters().get(name)
        if key == "step" or not isinstance(parameter, DTensor):
            return None
        return torch.zeros_like(parameter, dtype=torch.float32)

    def cuts_of(self, pointer: str) -> Cuts | None:
        """How a tensor of the state is cut over processes: as its parameter is."""
        return self.cuts.get(pointer.rpartition(".")[0])

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {
            name: parameter
            for group in self.optimizer.param_groups
            for name, parameter in zip(group["names"], group["params"], strict=True)
        }

    def load_state_dict(self, state: State) -> None:
        """Become ``state``. Raises ``CheckpointError`` if it is of other parameters."""
        names = [name for group in self.optimizer.param_groups for name in group["names"]]
        unknown, missing = sorted(state.keys() - set(names)), sorted(set(names) - state.keys())
        if state and (unknown or missing):
            example = (unknown or missing)[0]
            raise CheckpointError(
                f"optimizer state of other parameters: {len(unknown)} unknown, {len(missing)} "
                f"missing (for one, {example}); resume with the method and model of the checkpoint"
            )
        plain = self.optimizer.state_dict()
        plain["state"] = {i: dict(state[name]) for i, name in enumerate(names) if name in state}
        self.optimizer.load_state_dict(plain)
