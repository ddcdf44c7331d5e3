"""LoRA adapters that start from the weights, and frozen adapters beside the one that is trained.

PiSSA and OLoRA take low-rank factors of each weight as initial values. That part of the weight
needs to be subtracted. PEFT subtracts it from the base, so such an adapter opens on no other base.
Here the base remains as it is, and a frozen adapter has the part with the opposite sign.

All adapters of a layer together are one ordinary adapter, whose rank is the sum of all ranks: the
matrices A one above the other, the matrices B side by side. Files have them so (``together``).

``methods`` add adapters here, ``network`` computes and shards the initial values with
``factors_of``: in float32, by rules that depend on the weight and a seed alone, so any rank may
compute the factors of any weight.

Shapes: O and I the sizes of output and input, R rank, K the smaller of O and I, S the sketch of
the randomized SVD.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ..errors import RecipeError
from .lora_targets import endings
from .weight_matrices import is_added, plain_name

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

Computed = Literal["pissa", "olora"]
TRAINED, START = "default", "start"  # names of adapters, as PEFT has them
_PREFIX = "base_model.model."
_OVERSAMPLING = 8  # more directions than wanted, so that the last ones are exact, too


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
        return {
            f"{self.name}.{part}.{adapter}.weight": matrices[adapter].weight
            for adapter in self.adapters
        }


@dataclass(frozen=True)
class StartRule:
    """How the initial values of an adapter follow from the weights that it adapts."""

    kind: Computed
    iterations: int


def add_start(model: nn.Module, config: LoraConfig, kind: Computed, iterations: int) -> None:
    """Add the frozen counterpart of the trained adapter ``config``, which is 0 until their values
    are computed. Raises ``RecipeError`` if a layer is too small."""
    for stacked in _layers(model):
        full_rank = min(stacked.layer.in_features, stacked.layer.out_features)
        if full_rank < stacked.rank:
            raise RecipeError(
                f"method.lora.rank: {stacked.name.removeprefix(_PREFIX)} has at most rank "
                f"{full_rank}, of which init: {kind} cannot take {stacked.rank}; lower it, or set "
                "rank_pattern"
            )
    frozen_config = copy(config)
    frozen_config.lora_dropout, frozen_config.modules_to_save = 0.0, None
    add_frozen(model, START, frozen_config)
    model.start_rule = StartRule(kind, iterations)  # type: ignore[assignment]


def add_frozen(model: nn.Module, name: str, config: LoraConfig) -> None:
    """Add an adapter that is active and never trained."""
    before = {p: p.requires_grad for p in model.parameters()}
    peft: Any = model
    peft.add_adapter(name, config)
    for stacked in _layers(model):
        if name in stacked.adapters:  # PEFT leaves a second adapter of a meta model on the CPU
            device = stacked.layer.get_base_layer().weight.device
            for part in (stacked.layer.lora_A, stacked.layer.lora_B):
                part.to(device)
        # not through the model, which would activate modules to save
        stacked.layer.set_adapter(list(peft.peft_config))
    for parameter in model.parameters():
        parameter.requires_grad_(before.get(parameter, False))


def start_rule(model: nn.Module) -> StartRule | None:
    """The rule of the initial values, if they follow from the weights."""
    return getattr(model, "start_rule", None)


def stacked_layers(model: nn.Module) -> list[StackedLayer]:
    """The layers of which PEFT's ``model`` has adapters beside the trained one."""
    return [stacked for stacked in _layers(model) if set(stacked.adapters) != {TRAINED}]


def has_frozen(model: nn.Module) -> bool:
    """Whether PEFT's ``model`` has adapters beside the trained one."""
    return bool(set(getattr(model, "peft_config", ())) - {TRAINED})


def together(config: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """``adapter_config.json`` of one adapter that is all of ``model``'s together."""
    layers = {stacked.name.removeprefix(_PREFIX): stacked for stacked in _layers(model)}
    use_rslora = bool(config.get("use_rslora"))
    ranks = {name: stacked.rank for name, stacked in layers.items()}
    alphas = {
        name: _number(stacked.scale * (math.sqrt(stacked.rank) if use_rslora else stacked.rank))
        for name, stacked in layers.items()
    }
    changed: dict[str, Any] = {"init_lora_weights": True}
    for values, key, pattern in (
        (ranks, "r", "rank_pattern"),
        (alphas, "lora_alpha", "alpha_pattern"),
    ):
        most_common = Counter(values.values()).most_common(1)[0][0]
        changed[key] = most_common
        changed[pattern] = {name: value for name, value in values.items() if value != most_common}
    if any(TRAINED not in stacked.adapters for stacked in layers.values()):
        base_modules = {plain_name(name) for name, _ in model.named_modules() if not is_added(name)}
        changed["target_modules"] = endings(layers, base_modules)
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


@dataclass(frozen=True)
class Factors:
    """``scale * b @ a`` is the part of a weight that they stand for."""

    a: torch.Tensor  # [R, I]
    b: torch.Tensor  # [O, R]

    def to(self, dtype: torch.dtype) -> Factors:
        """The same on the CPU, in another type."""
        return Factors(*(t.to("cpu", dtype).contiguous() for t in (self.a, self.b)))


def factors_of(
    kind: Computed, weight_OI: torch.Tensor, rank: int, scale: float, *, iterations: int, seed: int
) -> Factors:
    """The factors of ``weight_OI`` by the rule ``kind``."""
    exact = torch.float64 if weight_OI.dtype == torch.float64 else torch.float32
    weight_OI = torch.empty(weight_OI.shape, dtype=exact, device=weight_OI.device).copy_(weight_OI)
    if kind == "olora":  # OLoRA (arXiv:2406.01775): the first columns and rows of the QR
        q_OK, r_KI = torch.linalg.qr(weight_OI)
        return Factors(r_KI[:rank], q_OK[:, :rank])
    return principal(weight_OI, rank, scale, iterations=iterations, seed=seed)


def principal(
    weight_OI: torch.Tensor, rank: int, scale: float, *, iterations: int, seed: int
) -> Factors:
    """PiSSA (arXiv:2404.02948): the largest singular values with their vectors, the root of each
    value in both factors. ``iterations`` of the randomized method (arXiv:0909.4061); 0: exact."""
    if iterations:
        u_OR, s_R, v_IR = _largest(weight_OI, rank, iterations, seed)
    else:
        u_OK, s_K, v_KI = torch.linalg.svd(weight_OI, full_matrices=False)
        u_OR, s_R, v_IR = u_OK[:, :rank], s_K[:rank], v_KI[:rank].T
    root_R = (s_R / scale).sqrt()
    return Factors(root_R[:, None] * v_IR.T, u_OR * root_R)


def seed_of(seed: int, name: str) -> int:
    """A seed for the weight ``name``, whatever the others are."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def _largest(
    weight_OI: torch.Tensor, rank: int, iterations: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ``rank`` largest singular values with their vectors, by iterations in a subspace."""
    size = min(rank + _OVERSAMPLING, *weight_OI.shape)
    generator = torch.Generator().manual_seed(seed)  # on the CPU: the same numbers everywhere
    start_IS = torch.randn(weight_OI.shape[1], size, generator=generator).to(weight_OI)
    q_OS = torch.linalg.qr(weight_OI @ start_IS).Q
    for _ in range(iterations):
        q_IS = torch.linalg.qr(weight_OI.T @ q_OS).Q
        q_OS = torch.linalg.qr(weight_OI @ q_IS).Q
    u_SS, s_S, v_SI = torch.linalg.svd(q_OS.T @ weight_OI, full_matrices=False)
    return (q_OS @ u_SS)[:, :rank], s_S[:rank], v_SI[:rank].T
