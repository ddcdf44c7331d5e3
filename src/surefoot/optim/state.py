"""The state of a torch optimizer under its parameters' names, in any order or grouping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ..errors import CheckpointError
from .state_tensor import StateTensor

State = Mapping[str, Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class NamedState:
    """``{parameter: {exp_avg: ..., exp_avg_sq: ..., step: ...}}`` of an optimizer whose groups have
    ``names``, without learning rate and other settings, which follow from the recipe and the
    step."""

    optimizer: torch.optim.Optimizer

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """The live tensors by parameter name; empty before the first step. Afterwards a parameter
        that has had no gradient yet has no tensors, but is there: it is among the trained ones."""
        if not self.optimizer.state:
            return {}
        return {
            name: dict(self.optimizer.state.get(parameter, {}))
            for group in self.optimizer.param_groups
            for name, parameter in zip(group["names"], group["params"], strict=True)
        }

    def load_state_dict(self, state: State) -> None:
        """Restore ``state``. Raises ``CheckpointError`` if it belongs to other parameters."""
        names = [name for group in self.optimizer.param_groups for name in group["names"]]
        if state and state.keys() != set(names):
            raise other_parameters(state, names)
        plain = self.optimizer.state_dict()
        plain["state"] = {i: dict(state[n]) for i, n in enumerate(names) if state.get(n)}
        self.optimizer.load_state_dict(plain)


def dtype_of(declared: StateTensor, parameter: torch.dtype, bf16_weights: str) -> torch.dtype:
    """The type of a state tensor of a parameter; bfloat16 weights are updated in float32, unless
    they are rounded to the nearest value."""
    if declared.dtype:
        found: torch.dtype = getattr(torch, declared.dtype)
        return found
    is_widened = parameter == torch.bfloat16 and bf16_weights != "nearest"
    return torch.float32 if is_widened else parameter


def other_parameters(found: Iterable[str], trained: Iterable[str]) -> CheckpointError:
    """The error for a state of the parameters ``found`` where others are ``trained``."""
    unknown, missing = sorted({*found} - {*trained}), sorted({*trained} - {*found})
    return CheckpointError(
        f"optimizer state of other parameters: {len(unknown)} unknown, {len(missing)} missing "
        f"(for example {(unknown or missing)[0]}); resume with the method and model of the "
        "checkpoint"
    )
