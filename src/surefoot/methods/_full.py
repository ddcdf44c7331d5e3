"""Tune all weights, those of some layers, or new layers (LLaMA Pro, arXiv:2401.02415)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from .. import model as models
from ..errors import RecipeError
from ..network.method import Method
from ..schema import Needs, must

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Full(Method):
    """Tune every weight, or all but some."""

    name: ClassVar[str] = "full"

    frozen_modules: tuple[str, ...] = ()
    """Modules that stay as they are, by the last part of the name, such as ``embed_tokens``.
    ``experts`` and ``routers`` are all of a mixture, whatever their names; ``tower``, ``projector``
    and ``language`` are those parts of a model that reads pictures."""

    def apply(self, model: PreTrainedModel) -> nn.Module:
        """Make every parameter trainable but those of ``frozen_modules``. Raises ``RecipeError``:
        one of them does not exist, or nothing is left."""
        model.requires_grad_(True)
        for name in self.frozen_modules:
            key = "method.full.frozen_modules"
            for parameter in models.weight_matrices.parameters_inside(model, name, key):
                parameter.requires_grad_(False)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise RecipeError(
                "method.full.frozen_modules: nothing would be trainable; name fewer modules"
            )
        module: nn.Module = model  # whose own methods have no types
        return module


@dataclass(frozen=True, kw_only=True)
class Freeze(Method):
    """Tune the last (or first) layers, or some modules of them, and any modules outside the
    layers."""

    name: ClassVar[str] = "freeze"

    num_layers: int = 2
    """Layers to tune: the last ones if positive, the first ones if negative."""
    modules: Annotated[tuple[str, ...], Needs("num_layers")] = ("all",)
    """Modules to tune inside those layers, such as ``mlp`` or ``self_attn``."""
    extra_modules: tuple[str, ...] = ()
    """Modules to tune outside the layers, such as ``embed_tokens``, ``norm`` or ``lm_head``."""

    def __post_init__(self) -> None:
        if self.num_layers == 0 and not self.extra_modules:
            raise ValueError(
                "num_layers is 0 and extra_modules is empty, so nothing would be trainable"
            )

    def apply(self, model: nn.Module) -> nn.Module:
        """Freeze everything, then make the chosen modules trainable. Raises ``RecipeError`` if one
        of them does not exist, or there are fewer layers than requested."""
        layers = models.weight_matrices.decoder_layers(model)
        if abs(self.num_layers) > len(layers):
            raise RecipeError(
                f"method.freeze.num_layers: expected at most {len(layers)}, the layers of the "
                f"model, got {self.num_layers}"
            )
        model.requires_grad_(False)
        chosen = layers[-self.num_layers :] if self.num_layers > 0 else layers[: -self.num_layers]
        for layer in chosen if self.num_layers else ():
            for module in self._inside(layer):
                module.requires_grad_(True)
        outside = {
            name.rsplit(".", 1)[-1]: module
            for name, module in model.named_modules()
            if name and not any(module is inner for layer in layers for inner in layer.modules())
        }
        for name in self.extra_modules:
            if name not in outside:
                raise RecipeError(_no_module("extra_modules", name, sorted(outside)))
            outside[name].requires_grad_(True)
        return model

    def _inside(self, layer: nn.Module) -> list[nn.Module]:
        if self.modules == ("all",):
            return [layer]
        submodules: dict[str, list[nn.Module]] = {}  # by the last part of their names
        for path, module in layer.named_modules():
            if path:
                submodules.setdefault(path.rsplit(".", 1)[-1], []).append(module)
        for name in self.modules:
            if name not in submodules:
                raise RecipeError(_no_module("modules", name, sorted(submodules)))
        return [module for name in self.modules for module in submodules[name]]


def _no_module(field: str, name: str, existing: list[str]) -> str:
    return f"method.freeze.{field}: no module {name!r} there; the model has {', '.join(existing)}"


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
        # When the model is opened, not by a command before: no second copy on the disk, and no
        # second recipe that must name the same layers (docs/decisions/0048).
        new = models.expansion.insert_layers(model, self.num_new_layers)
        model.requires_grad_(False)
        for layer in new:
            layer.requires_grad_(True)
        module: nn.Module = model  # whose own methods have no types
        return module
