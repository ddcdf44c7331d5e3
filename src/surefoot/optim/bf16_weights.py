"""Update some parameters at a time: bfloat16 weights in float32, and a state in main memory.

bfloat16 has 8 bits of precision. An update below about 0.2 % of a weight vanishes when the sum is
rounded to the nearest value, and so does nearly all of fine-tuning. So an optimizer never sees
bfloat16: for each update its parameters and gradients become float32, some at a time. What it makes
is rounded stochastically (up or down, in proportion to the distance, arXiv:2010.06192), so that
updates are right in the mean; or it stays as the master copy, of which the weight is the nearest
bfloat16. The optimizer's own state is float32 either way.

With ``offload_state`` the state rests in main memory, pinned, and that of the parameters at hand is
copied to the GPU for their update, and back.

The noise is a function of the update's number, the parameter's name and this rank's place in its
sharding. So a resumed run rounds as the uninterrupted one, and replicas stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ..parallel.progress import wait_for_ranks
from ._rules.few_bits import noise_for, round_stochastically
from ._rules.rule_optimizer import RuleOptimizer
from ._rules.sharded import buckets, local, size_of_part
from .optimizer import Named
from .state_tensor import ParameterKinds

if TYPE_CHECKING:
    from .optimizer import Optimizer

# bfloat16 has 8 bits: at a learning rate of 1e-5, an update of AdamW is below half a step of every
# weight above 0.005. Rounded to the nearest value, most weights never move, and no log shows it:
# after 200 steps a loss of 2.93 instead of 0.25 (decisions/0044).
Bf16Weights = Literal["stochastic", "master", "nearest"]
MASTER = "master"  # its key in the state of a parameter
# All at once would be 8 bytes a weight more, as hooks around ``optimizer.step()`` had it: as many
# as bfloat16 saves (decisions/0044).
BUCKET = 1 << 25  # elements that are float32 at once: 256 MiB with their gradients


def build_optimizer(
    optim: Optimizer, named: Named, layouts: ParameterKinds | None = None
) -> torch.optim.Optimizer:
    """The torch optimizer of ``named`` parameters; bfloat16 ones are updated as ``optim`` says."""
    names_and_parameters = list(named)  # which may be an iterator
    rule = optim.build(names_and_parameters, layouts or {})
    parameters = [parameter for _, parameter in names_and_parameters]
    has_bf16 = any(parameter.dtype == torch.bfloat16 for parameter in parameters)
    widens = has_bf16 and optim.bf16_weights != "nearest"
    offloads = optim.offload_state and any(not parameter.is_cpu for parameter in parameters)
    if not widens and not offloads:
        return rule
    mode: Bf16Weights = optim.bf16_weights if widens else "nearest"
    return BucketedOptimizer(rule, bf16_weights=mode, offloads=offloads)


def rule_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that computes the updates of ``optimizer``: itself, or the one inside."""
    return optimizer.rule if isinstance(optimizer, BucketedOptimizer) else optimizer


def move_weights(optimizer: torch.optim.Optimizer, *, for_gradients: bool) -> None:
    """Set the weights to the point at which gradients are computed, or back to those that
    evaluations and checkpoints see. For most optimizers these are the same."""
    rule = rule_of(optimizer)
    if isinstance(rule, RuleOptimizer):
        rule.move(for_gradients=for_gradients)


def update_size(sizes: Sequence[int], bf16_weights: str) -> int:
    """Bytes that an update of bfloat16 parameters of these ``sizes`` takes for a moment."""
    if bf16_weights == "nearest":
        return 0
    largest = max((sum(bucket) for bucket in buckets(sizes, lambda size: size, BUCKET)), default=0)
    return largest * (4 if bf16_weights == MASTER else 8)


def offloaded_size(states: Sequence[tuple[int, int]]) -> int:
    """Bytes of state that are on the GPU at once, of those in main memory, from the elements and
    the bytes of state of each parameter."""
    together = buckets(states, lambda each: each[0], BUCKET)
    return max((sum(state for _, state in bucket) for bucket in together), default=0)


class BucketedOptimizer(torch.optim.Optimizer):
    """The optimizer ``rule``, with its parameter groups and its state, of some parameters at a
    time: bfloat16 ones in float32 unless they are rounded to the nearest value."""

    def __init__(
        self, rule: torch.optim.Optimizer, *, bf16_weights: Bf16Weights, offloads: bool = False
    ) -> None:
        super().__init__(rule.param_groups, rule.defaults)
        self.rule, self.offloads = rule, offloads
        self.widens, self.keeps_master = bf16_weights != "nearest", bf16_weights == MASTER
        self.state = rule.state
        self.number = 0  # of the next update

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients. There is no ``closure``."""
        # As torch's fused optimizers take it: a step that is not finite changes nothing, and nobody
        # waits for the device to say so.
        if hasattr(self, "found_inf"):  # on the device: 1 if nothing is to be updated
            self.rule.found_inf = self.found_inf  # type: ignore[attr-defined]
        with_gradients = [
            (name, parameter, group)
            for group in self.param_groups
            for name, parameter in zip(group["names"], group["params"], strict=True)
            if parameter.grad is not None
        ]
        members = [(group["params"], group["names"]) for group in self.param_groups]
        try:
            for bucket in buckets(with_gradients, lambda each: size_of_part(each[1]), BUCKET):
                self._update(bucket)
        finally:
            for group, (parameters, names) in zip(self.param_groups, members, strict=True):
                group["params"], group["names"] = parameters, names
            if self.offloads and torch.cuda.is_available():
                # The state may be read on the CPU afterwards.
                wait_for_ranks(torch.cuda.current_stream().synchronize)

    def _update(self, bucket: Sequence[tuple[str, nn.Parameter, dict[str, Any]]]) -> None:
        """Update some parameters: the rule sees float32 tensors in their places."""
        for group in self.param_groups:
            # The rule updates whatever its groups contain: now the parameters of this bucket alone.
            group["params"], group["names"] = [], []
        hosts = [self._fetched(parameter) for _, parameter, _ in bucket]
        inside = [self._widened(parameter) for _, parameter, _ in bucket]
        for wide, (name, _, group) in zip(inside, bucket, strict=True):
            group["params"].append(wide)
            group["names"].append(name)
        self.rule.step()
        for wide, (name, parameter, _) in zip(inside, bucket, strict=True):
            if wide is not parameter:
                self._write(name, parameter, wide)
        for host, (_, parameter, _) in zip(hosts, bucket, strict=True):
            self._put_back(parameter, host)

    def _fetched(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Copy a state in main memory to its parameter's device; what it has in main memory."""
        state = self.state.get(parameter, {})
        if not self.offloads or not state:
            return {}
        # The update is computed where it always is, not on the CPU: one arithmetic gives the same
        # bits (decisions/0046).
        hosts = {key: value for key, value in state.items() if key != "step"}
        for key, value in hosts.items():
            state[key] = value.to(parameter.device, non_blocking=True)
        return hosts

    def _put_back(self, parameter: nn.Parameter, hosts: dict[str, torch.Tensor]) -> None:
        """Copy the state of ``parameter`` back to main memory, where it was."""
        for key, value in self.state[parameter].items() if self.offloads else ():
            if key != "step":
                host = hosts[key] if key in hosts else _in_main_memory(value)
                self.state[parameter][key] = host.copy_(value, non_blocking=True)

    def _widened(self, parameter: nn.Parameter) -> nn.Parameter:
        """A bfloat16 parameter in float32, with its gradient and its state; others as they are."""
        if parameter.dtype != torch.bfloat16 or not self.widens:
            return parameter
        state = self.state.pop(parameter, {})
        master = state.pop(MASTER, None)
        wide = nn.Parameter(parameter.float() if master is None else master)
        assert parameter.grad is not None
        wide.grad = parameter.grad.float()
        if state:
            self.state[wide] = state
        return wide

    def _write(self, name: str, parameter: nn.Parameter, wide: nn.Parameter) -> None:
        """Round the updated ``wide`` into ``parameter``, which gets its state back."""
        self.state[parameter] = self.state.pop(wide, {})
        if self.keeps_master:
            self.state[parameter][MASTER] = wide.detach()
            parameter.copy_(wide)
            return
        # Of number, name and place in the mesh, not of a global generator: replicas round alike, a
        # resume repeats it, and nothing has to be saved.
        noise = noise_for(self.number, name, parameter)
        round_stochastically(local(wide), local(parameter), noise)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore groups and state; tensors of bfloat16 parameters stay float32. A master copy that
        is not used is dropped, and one that is missing is made from the weight."""
        # Groups alone: torch would cast the state to the type of its parameter, bfloat16.
        super().load_state_dict({**state_dict, "state": {}})
        # torch has made new groups, which both optimizers must have in common again.
        self.rule.param_groups, self.rule.state = self.param_groups, self.state
        places = [(p, group) for group in self.param_groups for p in group["params"]]
        for number, values in state_dict["state"].items():
            parameter, group = places[number]
            self.state[parameter] = {
                key: value
                if key == "step" and not group.get("fused")
                else self._restored(key, parameter, value)
                for key, value in values.items()
                if key != MASTER or self.keeps_master
            }

    def _restored(self, key: str, parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        """A state tensor where it rests, in the dtype in which its parameter is updated."""
        is_wide = self.widens and parameter.dtype == torch.bfloat16
        dtype = torch.float32 if is_wide else parameter.dtype
        if isinstance(self.rule, RuleOptimizer):
            value = self.rule.restored(key, value, value.device, dtype)
        else:
            value = value.to(dtype if value.ndim else torch.float32)
        if not self.offloads or key == "step":
            return value.to(parameter.device)
        return _in_main_memory(value).copy_(value)


def _in_main_memory(like: torch.Tensor) -> torch.Tensor:
    """A tensor for a copy of ``like``, pinned if there is a GPU."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=torch.cuda.is_available())
