"""Tune every weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Full:
    """Tune every weight."""

    kind: ClassVar[Literal["full", "adapter"]] = "full"

    def apply(self, model: nn.Module) -> nn.Module:
        """Let every parameter learn."""
        return model.requires_grad_(True)
