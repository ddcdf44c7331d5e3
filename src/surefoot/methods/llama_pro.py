"""LLaMA Pro (arXiv:2401.02415): new decoder layers are trained, and all others stay as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .. import model as models
from ..network.method import Method
from ..schema import must

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class LLaMAPro(Method):
    """Insert decoder layers that return their input at first, and tune these alone. Checkpoints
    contain the deeper model."""

    name: ClassVar[str] = "llama_pro"

    num_new_layers: int = 2
    """Layers to insert, evenly spaced. Each is a copy of the layer before it, whose output
    projections are zero."""

    def __post_init__(self) -> None:
        must(self, "be at least 1", "num_new_layers")

    def apply(self, model: PreTrainedModel) -> nn.Module:
        """Insert the layers, and make only them trainable. Raises ``RecipeError`` if there are
        fewer layers to copy, or the architecture does not allow it."""
        new = models.insert_layers(model, self.num_new_layers)
        model.requires_grad_(False)
        for layer in new:
            layer.requires_grad_(True)
        made: nn.Module = model  # whose own methods have no types
        return made
