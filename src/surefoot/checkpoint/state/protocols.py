"""The ``Stateful`` and ``ShardedState`` protocols: what is saved, how ranks share it. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from ...parallel.sharding import Cuts


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
    """Weights or an optimizer state, of which each rank may have a part only.

    A pointer is the name of a tensor in the files: of weights the parameter's name, of an optimizer
    state ``name.exp_avg``.
    """

    def cuts_of(self, pointer: str, /) -> Cuts | None:
        """The sharding of a tensor; None if it is a DTensor's own, or there is none."""

    def is_copy(self, pointer: str, /) -> bool:
        """Whether another pipeline stage has the tensor as well, and writes it."""

    def like(self, pointer: str, /) -> torch.Tensor | None:
        """A tensor to load into where the state has none yet, cut as it will be; on the meta device
        if it belongs to another pipeline stage; None: an unsharded one."""
