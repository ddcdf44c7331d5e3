"""What a method owes the run: which weights learn."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from torch import nn


class Method(Protocol):
    """One way of tuning weights. Its fields are its settings in the recipe."""

    kind: ClassVar[Literal["full", "adapter"]]  # what its checkpoints hold

    def apply(self, model: nn.Module) -> nn.Module:
        """Make the model ready to train: freeze, wrap, or leave alone."""
