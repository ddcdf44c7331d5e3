"""Frozen adapters beside the one that is trained, on the same base.

A LoRA adapter that starts from a part of the weights needs that part to be subtracted. PEFT
subtracts it from the base, so such an adapter opens on no other base. Here the base remains as it
is, and a frozen adapter has the part with the opposite sign. All adapters of a layer together are
one ordinary adapter, whose rank is the sum of all ranks: the matrices A one above the other, the
matrices B side by side.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from ...errors import RecipeError
from ..adaptable import is_added, plain_name
from ..targets import endings
from .factors import Computed

if TYPE_CHECKING:  # slow to import, and here only names
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

TRAINED, START = "default", "start"  # names of adapters, as PEFT has them
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class StackedLayer:
    """A layer with several adapters."""

    name: str  # in PEFT's model, as in files
    layer: LoraLayer
    adapters: Sequence[str]  # that it has, the trained one first

    @property
    def scale(self) -> float:
        """That of the first; it is the scale of all of them together."""
        return float(self.layer.scaling[self.adapters[0]])

    @property
    def rank(self) -> int:
        """Of all together."""
        return sum(self.layer.r[adapter] for adapter in self.adapters)

    def factors(self, part: str) -> dict[str, nn.Parameter]:
        """The matrices ``lora_A`` or ``lora_B``, by their names in the model."""
        matrices = getattr(self.layer, part)
        return {f"{self.name}.{part}.{one}.weight": matrices[one].weight for one in self.adapters}


@dataclass(frozen=True)
class StartRule:
    """How the initial values of an adapter follow from the weights that it adapts."""

    kind: Computed
    iterations: int


def add_start(model: nn.Module, config: LoraConfig, kind: Computed, iterations: int) -> None:
    """Add the frozen counterpart of the trained adapter ``config``, which is 0 until their values
    are computed. Raises ``RecipeError`` if a layer is too small."""
    for found in _layers(model):
        if (most := min(found.layer.in_features, found.layer.out_features)) < found.rank:
            raise RecipeError(
                f"method.lora.rank: {found.name.removeprefix(_PREFIX)} has at most rank {most}, "
                f"of which init: {kind} cannot take {found.rank}; lower it, or set rank_pattern"
            )
    own = copy(config)
    own.lora_dropout, own.modules_to_save = 0.0, None
    add_frozen(model, START, own)
    model.start_rule = StartRule(kind, iterations)  # type: ignore[assignment]


def add_frozen(model: nn.Module, name: str, config: LoraConfig) -> None:
    """Add an adapter that is active and never trained."""
    before = {p: p.requires_grad for p in model.parameters()}
    peft: Any = model
    peft.add_adapter(name, config)
    for found in _layers(model):  # PEFT leaves a second adapter of a meta model on the CPU
        if name in found.adapters:
            device = found.layer.get_base_layer().weight.device
            for part in (found.layer.lora_A, found.layer.lora_B):
                part.to(device)
    activate_all(model)
    for parameter in model.parameters():
        parameter.requires_grad_(before.get(parameter, False))


def activate_all(model: nn.Module) -> None:
    """Compute with all adapters; not through the model, which would activate modules to save."""
    peft: Any = model
    for found in _layers(model):
        found.layer.set_adapter(list(peft.peft_config))


def start_rule(model: nn.Module) -> StartRule | None:
    """The rule of the initial values, if they follow from the weights."""
    return getattr(model, "start_rule", None)


def stacked_layers(model: nn.Module) -> list[StackedLayer]:
    """The layers of which PEFT's ``model`` has adapters beside the trained one."""
    return [one for one in _layers(model) if set(one.adapters) != {TRAINED}]


def has_frozen(model: nn.Module) -> bool:
    """Whether PEFT's ``model`` has adapters beside the trained one."""
    return bool(set(getattr(model, "peft_config", ())) - {TRAINED})


def together(config: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """``adapter_config.json`` of one adapter that is all of ``model``'s together."""
    layers = {found.name.removeprefix(_PREFIX): found for found in _layers(model)}
    root = bool(config.get("use_rslora"))
    ranks = {name: found.rank for name, found in layers.items()}
    alphas = {
        name: _number(found.scale * (math.sqrt(found.rank) if root else found.rank))
        for name, found in layers.items()
    }
    changed: dict[str, Any] = {"init_lora_weights": True}
    for values, usual, pattern in (
        (ranks, "r", "rank_pattern"),
        (alphas, "lora_alpha", "alpha_pattern"),
    ):
        most = Counter(values.values()).most_common(1)[0][0]
        changed[usual] = most
        changed[pattern] = {name: value for name, value in values.items() if value != most}
    if any(TRAINED not in found.adapters for found in layers.values()):
        every = {plain_name(name) for name, _ in model.named_modules() if not is_added(name)}
        changed["target_modules"] = endings(layers, every)
    return {**config, **changed}


def _number(value: float) -> float:
    """Without the last bits, in which a product with a quotient may differ, if it is whole."""
    return float(round(value)) if math.isclose(value, round(value)) else value


def _layers(model: nn.Module) -> Iterator[StackedLayer]:
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            order = sorted(module.r, key=lambda adapter: adapter != TRAINED)
            yield StackedLayer(name, module, order)
