"""The torch optimizer around an update rule: one parameter after the other, its state as declared.

A rule sees this rank's parts as plain tensors, so that element-wise arithmetic costs nothing more
when a parameter is sharded. What a rule needs of other ranks it says itself (``sharded``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..groups import Group
from ..layout import Layout, Layouts, layout_of
from ..optimizer import StateTensor, dtype_of, kept_dims
from .sharded import local, zeros


@dataclass(frozen=True)
class Update:
    """One update of one parameter."""

    name: str
    parameter: nn.Parameter
    state: dict[str, torch.Tensor]
    group: Mapping[str, Any]  # its learning rate and other settings
    declared: Mapping[str, StateTensor]
    layout: Layout
    number: int  # of its updates, from 1

    @property
    def value(self) -> torch.Tensor:
        """This rank's part of the weight."""
        return local(self.parameter)

    @property
    def grad(self) -> torch.Tensor:
        """This rank's part of the gradient."""
        assert self.parameter.grad is not None
        return local(self.parameter.grad)

    @property
    def rate(self) -> float:
        """The learning rate of this step."""
        return float(self.group["lr"])

    def tensor(self, key: str) -> torch.Tensor:
        """This rank's part of a state tensor; zeros before the first update."""
        if key not in self.state:
            declared, own = self.declared[key], self.parameter
            shape, dtype = tuple(own.shape), dtype_of(declared, own.dtype, "nearest")
            if made := declared.shape(shape):
                self.state[key] = zeros(made, kept_dims(declared, shape), own, dtype)
            else:
                self.state[key] = torch.zeros((), dtype=dtype, device=own.device)
        return local(self.state[key])

    def decay(self) -> None:
        """Decoupled weight decay (arXiv:1711.05101)."""
        if self.group["weight_decay"]:
            self.value.mul_(1 - self.rate * self.group["weight_decay"])


class Rule(torch.optim.Optimizer):
    """Applies ``update`` to every parameter that has a gradient, in order."""

    def __init__(
        self,
        groups: list[Group],
        update: Callable[[Update], None],
        declared: Mapping[str, StateTensor],
        layouts: Layouts,
        learning_rate: float,
    ) -> None:
        super().__init__(groups, {"lr": learning_rate})
        self.rule, self.declared, self.layouts = update, declared, layouts

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients. There is no ``closure``."""
        for name, parameter, group in self._wanted():
            state = self.state[parameter]
            if "step" not in state:
                state["step"] = torch.zeros(())
            state["step"] += 1
            layout = layout_of(name, parameter.ndim, self.layouts)
            number = int(state["step"])
            self.rule(Update(name, parameter, state, group, self.declared, layout, number))

    def _wanted(self) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
        for group in self.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                if parameter.grad is not None:
                    yield name, parameter, group

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore groups and state, in the types that are declared."""
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, values in state_dict["state"].items():
            own = parameters[number]
            self.state[own] = {
                key: self.restored(key, value, own.device, own.dtype)
                for key, value in values.items()
            }

    def restored(
        self, key: str, value: torch.Tensor, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor:
        """A state tensor where its parameter is, which is updated as ``dtype``, in the type that is
        declared."""
        if key == "step":
            return value
        declared = self.declared.get(key)
        return value.to(device, dtype_of(declared, dtype, "nearest") if declared else dtype)


def adamw(update: Update, beta1: float, beta2: float, epsilon: float) -> None:
    """AdamW (arXiv:1711.05101), in the order of torch's."""
    update.decay()
    grad, mean, square = update.grad, update.tensor("exp_avg"), update.tensor("exp_avg_sq")
    mean.lerp_(grad, 1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = (square.sqrt() / (1 - beta2**update.number) ** 0.5).add_(epsilon)
    update.value.addcdiv_(mean, root, value=-update.rate / (1 - beta1**update.number))
