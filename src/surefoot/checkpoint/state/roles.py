"""Roles: the groups of tensors that have files of their own in a checkpoint. No torch.

A role is the first part of a tensor's name in the manifest: ``value/score.weight``. What a role
contains follows from its name: ``state`` is what rank 0 alone saves, ``optimizer`` is the
optimizer state of ``model``, ``X_optimizer`` that of the weights ``X``, every other role is
weights. So readers need no list of roles, and a checkpoint may have any number of networks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..disk.manifest import Kind

if TYPE_CHECKING:
    import torch

    from ...parallel.sharding import Cuts


MODEL, OPTIMIZER, STATE = "model", "optimizer", "state"
_ENDING = "_optimizer"
_MODEL_STEMS: Mapping[Kind, str] = {"full": "model", "adapter": "adapter_model"}


@dataclass(frozen=True)
class FileRole:
    """A role in a checkpoint of ``kind``."""

    name: str
    kind: Kind = "full"

    @property
    def stem(self) -> str:
        """The name of its files without ``.safetensors``."""
        return _MODEL_STEMS[self.kind] if self.name == MODEL else self.name

    @property
    def is_adapter(self) -> bool:
        """Whether it has one unsharded file, as PEFT expects of an adapter."""
        return self.name == MODEL and self.kind == "adapter"

    @property
    def is_of_rank_0(self) -> bool:
        """Whether rank 0 alone saves it, unsharded in one file."""
        return self.name == STATE

    @property
    def is_optimizer(self) -> bool:
        """Whether it is the state of an optimizer."""
        return self.name == OPTIMIZER or self.name.endswith(_ENDING)

    @property
    def is_weights(self) -> bool:
        """Whether it is the weights of a network."""
        return not (self.is_of_rank_0 or self.is_optimizer)

    @property
    def optimizer(self) -> str:
        """The role of the optimizer state of these weights."""
        return OPTIMIZER if self.name == MODEL else f"{self.name}{_ENDING}"

    @property
    def is_split_by_size(self) -> bool:
        """Whether its files have a maximal size."""
        return not (self.is_adapter or self.is_of_rank_0)


def part_of(role: str) -> str:
    """The role of the first network that contains the same: model, optimizer or state."""
    file_role = FileRole(role)
    if file_role.is_of_rank_0:
        return STATE
    return OPTIMIZER if file_role.is_optimizer else MODEL


def role_of(full_name: str) -> str:
    """The role in a tensor's full name."""
    return full_name.partition("/")[0]


def roles_of(full_names: Iterable[str]) -> tuple[str, ...]:
    """The roles of tensors, in alphabetical order: model, optimizer, state, then other networks."""
    return tuple(sorted({role_of(name) for name in full_names}))


def trained_names(optimizer_tensors: Iterable[str]) -> set[str]:
    """The parameters that an optimizer updates, from the names of its tensors, ``name.exp_avg``."""
    return {name.rpartition(".")[0] for name in optimizer_tensors}


class Stateful(Protocol):
    """Anything with a state: the model, the optimizer, the loader, the random generators.

    A state is made of dicts, lists, tuples, numbers, text, None and dense tensors. Weights and
    optimizer states have files of their own: weights are a flat dict of tensors under the names of
    the weight file, an optimizer state is a dict of parameter name to dict.
    """

    def state_dict(self) -> dict[str, Any]:
        """The current state. Tensors may be the owner's own: saving only reads them.

        Loading calls this as well, and reads into the tensors that fit, so that ``load_state_dict``
        may find its own tensors already filled.
        """

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Restore ``state``."""


class ShardedState(Stateful, Protocol):
    """Weights or an optimizer state, of which each rank may have a part only. A class that inherits
    this has every tensor in full.

    A pointer is the name of a tensor in the files: of weights the parameter's name, of an optimizer
    state ``name.exp_avg``.
    """

    def cuts_of(self, pointer: str, /) -> Cuts | None:
        """The sharding of a tensor; None if it is a DTensor's own, or there is none."""
        return None

    def is_copy(self, pointer: str, /) -> bool:
        """Whether another pipeline stage has the tensor as well, and writes it."""
        return False

    def like(self, pointer: str, /) -> torch.Tensor | None:
        """A tensor to load into where the state has none yet, cut as it will be; on the meta device
        if it belongs to another pipeline stage; None: an unsharded one."""
        return None
