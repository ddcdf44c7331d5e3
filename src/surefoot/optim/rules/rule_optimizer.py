"""The torch optimizer around an update rule: one parameter after the other, its state as declared.

A rule sees this rank's parts as plain tensors, so that element-wise arithmetic costs nothing more
when a parameter is sharded. What a rule needs of other ranks it says itself (``sharded``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ..groups import Group
from ..optimizer import Optimizer, StateTensor, kept_dims
from ..parameter_kind import ParameterKind, ParameterKinds, layout_of
from ..state import dtype_of
from .sharded import local, zeros


@dataclass(frozen=True)
class Update:
    """One update of one parameter."""

    name: str
    parameter: nn.Parameter
    state: dict[str, torch.Tensor]
    group: Mapping[str, Any]  # its learning rate and other settings
    declared: Mapping[str, StateTensor]
    layout: ParameterKind
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


class Points(Protocol):
    """Where gradients are computed, if the weights are others between the steps."""

    def for_gradients(self, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weights of a forward and backward pass."""

    def at_rest(self, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weights of evaluations and checkpoints."""


class RuleOptimizer(torch.optim.Optimizer):
    """Applies ``update`` to every parameter that has a gradient, in order."""

    def __init__(
        self,
        groups: list[Group],
        update: Callable[[Update], None],
        declared: Mapping[str, StateTensor],
        layouts: ParameterKinds,
        learning_rate: float,
        points: Points | None = None,
    ) -> None:
        super().__init__(groups, {"lr": learning_rate})
        self.points = points
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

    @torch.no_grad()
    def move(self, *, for_gradients: bool) -> None:
        """Set the weights to the point at which gradients are computed, or back."""
        if self.points is None:
            return
        point = self.points.for_gradients if for_gradients else self.points.at_rest
        for group in self.param_groups:
            for parameter in group["params"]:
                if state := self.state.get(parameter):
                    here = {key: local(tensor) for key, tensor in state.items()}
                    local(parameter).copy_(point(here))

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


def build(
    optim: Optimizer,
    groups: list[Group],
    update: Callable[[Update], None],
    layouts: ParameterKinds | None,
    points: Points | None = None,
) -> RuleOptimizer:
    """The torch optimizer of ``optim``, whose rule is ``update``."""
    known, rate = layouts or {}, optim.learning_rate
    return RuleOptimizer(groups, update, optim.state_tensors, known, rate, points)


def adamw(update: Update, beta1: float, beta2: float, epsilon: float) -> None:
    """AdamW (arXiv:1711.05101) with moments of the parameter's shape."""
    mean, square = update.tensor("exp_avg"), update.tensor("exp_avg_sq")
    adamw_of(update, mean, square, (beta1, beta2, epsilon))


def adamw_of(
    update: Update,
    mean: torch.Tensor,
    square: torch.Tensor,
    settings: tuple[float, float, float],
) -> None:
    """AdamW's update with these moments, which change, in the order of torch's. ``settings`` are
    both betas and epsilon."""
    beta1, beta2, epsilon = settings
    update.decay()
    grad = update.grad.to(mean.dtype)
    mean.lerp_(grad, 1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = (square.sqrt() / (1 - beta2**update.number) ** 0.5).add_(epsilon)
    rate = update.rate / (1 - beta1**update.number)
    if mean.dtype == update.value.dtype:
        update.value.addcdiv_(mean, root, value=-rate)
    else:
        update.value.sub_(mean / root, alpha=rate)
