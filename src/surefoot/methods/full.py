"""Tune every weight, or all but some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .. import model as models
from ..errors import RecipeError
from ..network.method import Method

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Full(Method):
    """Tune every weight, or all but some."""

    name: ClassVar[str] = "full"

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
