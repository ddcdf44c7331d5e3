"""Tune every weight, or all but some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .. import model as models
from ..errors import RecipeError
from ..model.section import ModelSection
from ..schema import Problem
from .rules import all_weights, attach_any, every_name, problems_of_own_weights, unchanged

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Full:
    """Tune every weight, or all but some."""

    saves_base_model: ClassVar[bool] = True
    packages: ClassVar[Sequence[str]] = ()
    weights = all_weights
    trainable = every_name
    continued = unchanged
    attach = attach_any

    frozen_modules: tuple[str, ...] = ()
    """Modules that stay as they are, by the last part of the name, such as ``embed_tokens``.
    ``experts`` and ``routers`` are all of a mixture, whatever their names."""

    def apply(self, model: PreTrainedModel) -> nn.Module:
        """Make every parameter trainable but those of ``frozen_modules``. Raises ``RecipeError``:
        one of them does not exist, or nothing is left."""
        model.requires_grad_(True)
        for name in self.frozen_modules:
            for parameter in models.parameters_inside(model, name, "method.full.frozen_modules"):
                parameter.requires_grad_(False)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise RecipeError(
                "method.full.frozen_modules: nothing would be trainable; name fewer modules"
            )
        made: nn.Module = model  # whose own methods have no types
        return made

    def problems(self, model: ModelSection) -> Iterator[Problem]:
        """What must hold for weights that are trained themselves."""
        return problems_of_own_weights("full", model)
