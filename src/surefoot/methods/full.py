"""Tune every weight."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .. import model as models
from ..model.section import ModelSection
from ..schema import Problem
from .rules import problems_of_own_weights

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from ..network.method import UnshardedWeights


@dataclass(frozen=True, kw_only=True)
class Full:
    """Tune every weight."""

    saves_base_model: ClassVar[bool] = True
    packages: ClassVar[Sequence[str]] = ()

    def apply(self, model: nn.Module) -> nn.Module:
        """Make every parameter trainable."""
        return model.requires_grad_(True)

    def weights(self, module: nn.Module, inner: PreTrainedModel) -> UnshardedWeights:
        """All weights of the model."""
        return models.FullWeights(inner)

    def trainable(self, step: int, names: Sequence[str]) -> Collection[str]:
        """All, at every step."""
        return names

    def problems(self, model: ModelSection) -> Iterator[Problem]:
        """What must hold for weights that are trained themselves."""
        return problems_of_own_weights("full", model)
