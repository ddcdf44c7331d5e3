"""The optimizer of the currently trainable parameters, which may change from step to step.

A matrix of which each update changes some entries has these as a parameter of their own: so the
optimizer's state, and what is kept of the gradient, are of their size.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError, RecipeError
from ..log import fell_back
from ..parallel.sharding import Cuts
from ._rules.sharded import local, part_of, sharded_as
from .bf16_weights import BucketedOptimizer, build_optimizer
from .blocks import ENTRIES, EntryTurns, check_entries
from .optimizer import Optimizer, check_learning_rates, log_learning_rates, with_parts
from .state import NamedState, State, StateCuts, other_parameters, plain_cuts
from .state_tensor import ParameterKinds

# Of these names, those of the parameters that update number `step` (from 0) changes.
Trainable = Callable[[int, Sequence[str]], Collection[str]]


def every_name(_step: int, names: Sequence[str]) -> Collection[str]:
    """All parameters, at every step."""
    return names


def unsupported_by_pipelines() -> RecipeError:
    """The error for a method that trains other parameters at other steps."""
    return RecipeError(
        "parallel.pp: the method changes its trainable parameters, which a pipeline "
        "does not support; leave pp at 1 and use parallel.dp_shard"
    )


def _other_entries() -> CheckpointError:
    return CheckpointError(
        "optimizer state of other entries: the method and its update_ratio, mask and "
        "switch_interval, and train.seed must be those of the checkpoint; resume with its settings"
    )


@dataclass
class TrainedParameters:
    """The trainable parameters of one network and their optimizer, which is rebuilt whenever they
    change. Its state is the optimizer's, because the step determines the parameters."""

    optim: Optimizer
    named: Mapping[str, nn.Parameter]  # on this rank, all that may be trained, by names in files
    trainable: Trainable = every_name
    cuts: Mapping[str, Cuts] = field(default_factory=dict)  # of sharded ones
    names: Sequence[str] = ()  # of the whole model, if this rank has some layers of it
    layouts: ParameterKinds = field(default_factory=dict)  # what each is in its model
    entries: EntryTurns | None = None  # None: all entries of what is trained
    optimizer: torch.optim.Optimizer = field(init=False)
    _active: frozenset[str] = field(init=False, default=frozenset())
    _turn: int = field(init=False, default=0)  # of the entries
    _identity: int | None = field(init=False, default=None)  # of the turn of the loaded state
    _is_unchecked: bool = field(init=False, default=False)  # a state was loaded, at which step?

    def __post_init__(self) -> None:
        self.names = self.names or tuple(self.named)
        patterns, names = self.optim.learning_rates, with_parts(self.names, self.layouts)
        check_learning_rates(patterns, names)
        log_learning_rates(self.optim.learning_rate, patterns, names)
        if self.optim.offload_state and all(each.is_cpu for each in self.named.values()):
            what, why = "optim.offload_state moves nothing", "the weights are in main memory, too"
            fell_back(what, why, "saves no memory", logging.INFO)
        shapes = {name: tuple(parameter.shape) for name, parameter in self.named.items()}
        sharded = {name: plain_cuts(cuts) for name, cuts in self.cuts.items()}
        check_entries(self.entries, self.optim, shapes, sharded)
        self._partial = partial_parameters(self.named, self.entries)
        trained = {name: self._seen(name) for name in self.named}
        self._cuts = StateCuts(self.optim, trained, self.cuts)
        self._cuts.check()
        self._become(self._names_at(0), 0)

    def at(self, step: int) -> torch.optim.Optimizer:
        """The optimizer for update ``step``: a new one if other parameters or entries of them are
        trainable."""
        self.check(step)
        names, turn = self._names_at(step), self._turn_at(step)
        if names != self._active or turn != self._turn:
            self._become(names, turn)
        if isinstance(self.optimizer, BucketedOptimizer):
            self.optimizer.number = step
        return self.optimizer

    def check(self, step: int) -> None:
        """Raise ``CheckpointError`` if the loaded state cannot be that after ``step`` updates."""
        if not self._is_unchecked:
            return
        # A state is that of the parameters of the last update, number step - 1.
        last, turn = self._names_at(max(0, step - 1)), self._turn_at(max(0, step - 1))
        if self._active != last:
            raise other_parameters(self._active, last)
        if self._identity is not None and self.entries is not None:
            if self._identity != self.entries.identity(turn):
                raise _other_entries()
            self._begin(turn)
        self._is_unchecked = False

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """The live tensors of the currently trainable parameters; with some entries of a matrix,
        also which ones these are."""
        state = NamedState(self.optimizer).state_dict()
        if self.entries is not None:
            is_loaded = self._is_unchecked and self._identity is not None
            turn_identity = self._identity if is_loaded else self.entries.identity(self._turn)
            identity = torch.tensor(turn_identity)
            for name in self._partial.keys() & state.keys():
                state[name] |= {ENTRIES: identity} if state[name] else {}
        return state

    def load_state_dict(self, state: State) -> None:
        """Restore ``state``; its parameters are then the trainable ones. Raises ``CheckpointError``
        if some of them do not belong to this network."""
        names = frozenset(state)
        if names - self.named.keys():
            raise other_parameters(names, self._active)
        if names and names != self._active:
            self._become(names, self._turn)
        state_by_name = {name: dict(tensors) for name, tensors in state.items()}
        self._identity = self._taken_identity(state_by_name)
        NamedState(self.optimizer).load_state_dict(state_by_name)
        self._is_unchecked = bool(names)

    def _taken_identity(self, state: dict[str, dict[str, torch.Tensor]]) -> int | None:
        """What the loaded ``state``, from which it is taken, says of the entries that it is of."""
        identity = None
        for name, tensors in state.items():
            saved_identity = tensors.pop(ENTRIES, None)
            if tensors and (saved_identity is None) == (name in self._partial):
                raise _other_entries()
            identity = identity if saved_identity is None else int(saved_identity)
        return identity

    def drop_gradients(self) -> None:
        """Free the gradients of entries; those of parameters belong to the model."""
        for partial in self._partial.values():
            partial.entries.grad = None

    def like(self, pointer: str) -> torch.Tensor | None:
        """A tensor of the state that does not exist yet, with its sharding."""
        return self._cuts.like(pointer)

    def cuts_of(self, pointer: str) -> Cuts | None:
        """The sharding of a tensor of the state."""
        return self._cuts.of(pointer)

    def is_copy(self, pointer: str) -> bool:
        """No other pipeline stage has it."""
        return False

    def _names_at(self, step: int) -> frozenset[str]:
        return frozenset(self.trainable(step, self.names)) & self.named.keys()

    def _turn_at(self, step: int) -> int:
        return 0 if self.entries is None else self.entries.turn(step)

    def _seen(self, name: str) -> nn.Parameter:
        """The parameter that the optimizer has for ``name``."""
        return self._partial[name].entries if name in self._partial else self.named[name]

    def _begin(self, turn: int) -> None:
        """Train the entries of ``turn``."""
        self._turn = turn
        for partial in self._partial.values():
            partial.begin(turn)

    def _become(self, names: frozenset[str], turn: int) -> None:
        """Make ``names`` trainable and freeze the others, whose state is freed, and all gradients.
        The state of parameters that remain trainable is kept: their training is not interrupted.
        But that of a matrix is freed if other entries of it become trainable."""
        if len(self.names) > len(self.named) and names != self.named.keys():
            raise unsupported_by_pipelines()
        for name, parameter in self.named.items():
            parameter.requires_grad_(name in names)
            parameter.grad = None
        changed = self._partial.keys() if turn != self._turn else frozenset[str]()
        # LISA trains embeddings and head at every step: their moments must not begin anew at each
        # switch.
        continued_state = self._state_of(names & self._active - changed)
        self._begin(turn)
        active = [(name, self._seen(name)) for name in self.named if name in names]
        self.optimizer = build_optimizer(self.optim, active, self.layouts)
        for partial in (self._partial[name] for name in self._partial.keys() & names):
            self.optimizer.register_step_pre_hook(partial.before_step)
            self.optimizer.register_step_post_hook(partial.after_step)
        if continued_state:
            NamedState(self.optimizer).load_state_dict(
                {name: continued_state.get(name, {}) for name in names}
            )
        self._active = names

    def _state_of(self, names: frozenset[str]) -> dict[str, dict[str, torch.Tensor]]:
        """The state of these of the currently trainable parameters, as far as they have one."""
        state = NamedState(self.optimizer).state_dict() if names else {}
        return {name: state[name] for name in names if state.get(name)}


class PartialParameter:
    """The trained entries of ``weight`` in one turn after the other. After each micro-batch they
    take over their part of the gradient, and the rest of it is freed."""

    def __init__(self, name: str, weight: nn.Parameter, turns: EntryTurns) -> None:
        shape = turns.shape(name, tuple(weight.shape))
        local_weight = local(weight)
        values = local_weight.new_zeros(*local_weight.shape[:-1], shape[-1])
        self.weight, self.entries = weight, nn.Parameter(_sharded_like(weight, values))
        self.order, self.shifts = _drawn(name, weight, turns)
        self.start = 0  # of the turn, in the order of columns
        # The entries are a parameter of their own for the optimizer, so that norm, clipping, master
        # copies and state need no second form (decisions/0046).
        weight.register_post_accumulate_grad_hook(self._keep_gradient)  # type: ignore[no-untyped-call]

    def begin(self, turn: int) -> None:
        """Train the entries of ``turn``: after those of the turn before, and around."""
        # As many columns of every row: of a range over the flattened matrix, as BAdam has it, most
        # ranks of a mesh would have nothing (decisions/0046).
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
        trained_grad = local(weight.grad).gather(-1, self._columns())
        weight.grad = None
        if self.entries.grad is None:
            self.entries.grad = _sharded_like(self.weight, trained_grad)
        else:
            local(self.entries.grad).add_(trained_grad)

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
    # Not ``hash()``, which Python salts: every rank and every resume must draw the same.
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
    return sharded_as(weight, values, (*weight.shape[:-1], values.shape[-1]))
