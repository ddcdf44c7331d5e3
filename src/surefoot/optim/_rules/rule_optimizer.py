"""The torch optimizer around an update rule: one parameter after the other, its state as declared.

A rule sees this rank's parts as plain tensors, so that element-wise arithmetic costs nothing more
when a parameter is sharded. What a rule needs of other ranks it says itself (``sharded``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.adamw import adamw

from ..state_tensor import ParameterKind, ParameterKinds, StateTensor, kept_dims, layout_of
from .sharded import (
    add_over_shards,
    gathered_rows,
    local,
    mean_over,
    mean_square,
    own_rows,
    zeros,
)


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
            declared, parameter = self.declared[key], self.parameter
            shape, dtype = tuple(parameter.shape), dtype_of(declared, parameter.dtype, "nearest")
            if state_shape := declared.shape(shape):
                self.state[key] = zeros(state_shape, kept_dims(declared, shape), parameter, dtype)
            else:
                self.state[key] = torch.zeros((), dtype=dtype, device=parameter.device)
        return local(self.state[key])

    @property
    def precision(self) -> float:
        """The distance from 1 to the next larger number in the type of the weight."""
        return torch.finfo(self.value.dtype).eps

    def decay(self) -> None:
        """Decoupled weight decay (arXiv:1711.05101)."""
        if self.group["weight_decay"]:
            self.value.mul_(1 - self.rate * self.group["weight_decay"])

    def adamw(self, beta1: float, beta2: float, epsilon: float) -> None:
        """AdamW (arXiv:1711.05101) with moments of the parameter's shape."""
        moments = self.tensor("exp_avg"), self.tensor("exp_avg_sq")
        self.adamw_of(self.value, self.grad, moments, (beta1, beta2, epsilon))

    def adamw_of(
        self,
        value: torch.Tensor,
        grad: torch.Tensor,
        moments: tuple[torch.Tensor, torch.Tensor],
        settings: tuple[float, float, float],
    ) -> None:
        """AdamW's update of some elements, with these moments, which change. ``settings`` are both
        betas and epsilon."""
        beta1, beta2, epsilon = settings
        decay, (mean, square) = float(self.group["weight_decay"]), moments
        if _is_fusible(value, grad, mean, square):
            # torch's kernel adds 1 to the number of the step itself.
            step = torch.full((), self.number - 1.0, device=value.device)
            adamw(
                [value],
                [grad],
                [mean],
                [square],
                [],
                [step],
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=self.rate,
                weight_decay=decay,
                eps=epsilon,
                maximize=False,
            )
            return
        value.mul_(1 - self.rate * decay)
        grad = grad.to(mean.dtype)
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (square.sqrt() / (1 - beta2**self.number) ** 0.5).add_(epsilon)
        value.sub_(mean / root, alpha=self.rate / (1 - beta1**self.number))

    def add_over_shards(self, values: torch.Tensor, dims: Collection[int]) -> torch.Tensor:
        """``values``, summed in place over the ranks that have other parts along ``dims``."""
        return add_over_shards(values, self.parameter, dims)

    def mean_over(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        """The mean of ``values`` along ``dim``, which keeps size 1, over all parts."""
        return mean_over(values, self.parameter, dim)

    def mean_square(self, values: torch.Tensor) -> torch.Tensor:
        """The mean square of a tensor that is sharded as the parameter is; a scalar."""
        return mean_square(values, self.parameter)

    def gathered_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """One number for each row of a matrix, of which every rank has those of its part."""
        return gathered_rows(rows, self.parameter)

    def own_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's of the numbers of all rows of a matrix."""
        return own_rows(rows, self.parameter)


class Points(Protocol):
    """Where gradients are computed, if the weights are others between the steps."""

    def for_gradients(self, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weights of a forward and backward pass."""

    def at_rest(self, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weights of evaluations and checkpoints."""


Rule = Callable[[Sequence[Update]], None]  # updates all parameters of a step


class RuleOptimizer(torch.optim.Optimizer):
    """Applies ``rule`` to all parameters that have a gradient."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        rule: Rule,
        declared: Mapping[str, StateTensor],
        layouts: ParameterKinds,
        *,
        learning_rate: float,
        points: Points | None = None,
    ) -> None:
        super().__init__(groups, {"lr": learning_rate})
        self.points = points
        self.rule, self.declared, self.layouts = rule, declared, layouts

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients. There is no ``closure``."""
        self.rule([self._update(*entry) for entry in self._with_gradients()])

    def _update(self, name: str, parameter: nn.Parameter, group: dict[str, Any]) -> Update:
        state = self.state[parameter]
        if "step" not in state:
            # On the CPU, where a rule reads it at every update without waiting for the device.
            state["step"] = torch.zeros(())
        state["step"] += 1
        layout, number = layout_of(name, parameter.ndim, self.layouts), int(state["step"])
        return Update(name, parameter, state, group, self.declared, layout, number)

    @torch.no_grad()
    def move(self, *, for_gradients: bool) -> None:
        """Set the weights to the point at which gradients are computed, or back."""
        if self.points is None:
            return
        point = self.points.for_gradients if for_gradients else self.points.at_rest
        for group in self.param_groups:
            for parameter in group["params"]:
                if state := self.state.get(parameter):
                    weights = local(parameter)
                    # The state may be offloaded, to pinned memory. The number of the step, which no
                    # point depends on, is on the CPU: sending it would wait for the device.
                    local_state = {
                        key: local(tensor).to(weights.device, non_blocking=True)
                        for key, tensor in state.items()
                        if key != "step"
                    }
                    weights.copy_(point(local_state))

    def _with_gradients(self) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
        for group in self.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                if parameter.grad is not None:
                    yield name, parameter, group

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore groups and state, in the types that are declared."""
        # Without the state: torch casts each of its tensors to the type of the
        # parameter, codes of 8 bits, too.
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, values in state_dict["state"].items():
            parameter = parameters[number]
            self.state[parameter] = {
                key: self.restored(key, value, parameter.device, parameter.dtype)
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


def _is_fusible(*tensors: torch.Tensor) -> bool:
    """Whether torch's kernel, which reads memory in order and one type, can take them."""
    first = tensors[0]
    return first.dtype in (torch.float32, torch.float64) and all(
        each.is_contiguous() and each.dtype == first.dtype for each in tensors
    )


class FusedAdamW(torch.optim.AdamW):
    """AdamW whose kernel gets what each rank holds, as its update is that of each element alone;
    parameters and moments stay distributed ones.

    The kernel would get them anyway. But ``DTensor`` first asks how a list may be distributed, for
    each of its tensors and every placement: a second at the first step of some hundred parameters.
    """

    def _init_group(self, group, *lists):  # type: ignore[no-untyped-def]
        has_complex = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return has_complex


def dtype_of(declared: StateTensor, parameter: torch.dtype, bf16_weights: str) -> torch.dtype:
    """The type of a state tensor of a parameter; bfloat16 weights are updated in float32, unless
    they are rounded to the nearest value."""
    if declared.dtype:
        named_dtype: torch.dtype = getattr(torch, declared.dtype)
        return named_dtype
    is_widened = parameter == torch.bfloat16 and bf16_weights != "nearest"
    return torch.float32 if is_widened else parameter
