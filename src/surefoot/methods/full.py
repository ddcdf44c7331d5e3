"""Tune every weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..model.section import ModelSection
from ..schema import Problem
from .rules import all_weights, attach_any, every_name, problems_of_own_weights, unchanged

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Full:
    """Tune every weight."""

    saves_base_model: ClassVar[bool] = True
    packages: ClassVar[Sequence[str]] = ()
    weights = all_weights
    trainable = every_name
    continued = unchanged
    attach = attach_any

    def apply(self, model: nn.Module) -> nn.Module:
        """Make every parameter trainable."""
        return model.requires_grad_(True)

    def problems(self, model: ModelSection) -> Iterator[Problem]:
        """What must hold for weights that are trained themselves."""
        return problems_of_own_weights("full", model)
