"""The values of an adapter that starts from the weights it adapts."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from functools import partial

import torch

from ...model.adapters.factors import Factors, factors_of, seed_of
from ...model.adapters.frozen import START, TRAINED, StackedLayer, StartRule, stacked_layers
from ...model.adapters.frozen import start_rule as rule_of
from ...model.pretrained.loading import device
from ...model.pretrained.quantized import dequantized
from ...parallel.box import Box
from ..draft import Draft
from ..meta import Reader, ShardLoader, piece

logger = logging.getLogger(__name__)


def set_initial_values(draft: Draft) -> None:
    """Compute the values of an adapter that starts from the weights. Ranks share the work."""
    if (rule := rule_of(draft.module)) is None:
        return
    started = time.monotonic()
    layers = [found for found in stacked_layers(draft.module) if START in found.adapters]
    readers: dict[str, Reader] = {}
    for found, factors in _computed(draft, layers, rule):
        values = _values(found, factors)
        if draft.values is not None:
            readers |= {name: partial(piece, tensor) for name, tensor in values.items()}
            continue
        for name, tensor in values.items():
            draft.module.get_parameter(name).detach().copy_(tensor)
    if draft.values is not None:
        known = draft.values
        draft.values = ShardLoader({**known.readers, **readers}, known.tensors)
    seconds = time.monotonic() - started
    logger.info("%s: initial values of %d layers in %.1f s", rule.kind, len(layers), seconds)


def _computed(
    draft: Draft, layers: list[StackedLayer], rule: StartRule
) -> Iterator[tuple[StackedLayer, Factors]]:
    """The factors of each layer, each computed by one rank: all have the same bits of them."""
    world, seed = draft.world, draft.options.seed
    for first in range(0, len(layers), world.size):
        turn = layers[first : first + world.size]
        own = None
        if world.rank < len(turn):
            found = turn[world.rank]
            own = factors_of(
                rule.kind,
                _weight(draft, found),
                found.layer.r[TRAINED],
                found.scale,
                iterations=rule.iterations,
                seed=seed_of(seed, found.name),
            ).to(next(iter(found.factors("lora_A").values())).dtype)
        yield from zip(turn, world.gathered(own), strict=False)


def _weight(draft: Draft, found: StackedLayer) -> torch.Tensor:
    """The weight of a layer, [O, I], on this process's device."""
    base = found.layer.get_base_layer()
    weight = base.weight
    if draft.values is None:
        weight_OI = dequantized(base)
    else:
        names = {id(tensor): name for name, tensor in draft.values.tensors.items()}
        read = draft.values.readers[names[id(weight)]]
        weight_OI = read(Box.whole(tuple(weight.shape))).to(device())
    return weight_OI.T if found.layer.fan_in_fan_out else weight_OI


def _values(found: StackedLayer, factors: Factors) -> Mapping[str, torch.Tensor]:
    """The values of the trained and the frozen adapter, whose sum is 0."""
    a, b = f"{found.name}.lora_A", f"{found.name}.lora_B"
    return {
        f"{a}.{TRAINED}.weight": factors.a,
        f"{b}.{TRAINED}.weight": factors.b,
        f"{a}.{START}.weight": factors.a,
        f"{b}.{START}.weight": -factors.b,
    }
