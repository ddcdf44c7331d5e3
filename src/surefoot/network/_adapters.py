"""Adapters in a network: values computed from weights, several stored as one.

The values of an adapter that starts from the weights it adapts.

The weights of an adapter that is stored together with frozen ones, as one adapter.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..checkpoint.state.states import local_box_of
from ..errors import CheckpointError, counted
from ..model.adapters import (
    START,
    TRAINED,
    Factors,
    StackedLayer,
    StartRule,
    factors_of,
    seed_of,
    stacked_layers,
)
from ..model.adapters import start_rule as rule_of
from ..model.config import dequantized
from ..model.loading import device
from ..model.weights import AdapterWeights
from ..parallel.progress import wait_for_ranks
from ..parallel.sharding import Box, axes
from .draft import Draft
from .shard_loading import Reader, ShardLoader, piece

logger = logging.getLogger(__name__)


def set_initial_values(draft: Draft) -> None:
    """Compute the values of an adapter that starts from the weights. Ranks share the work."""
    if (rule := rule_of(draft.module)) is None:
        return
    started = time.monotonic()
    layers = [stacked for stacked in stacked_layers(draft.module) if START in stacked.adapters]
    readers: dict[str, Reader] = {}
    for stacked, factors in _computed(draft, layers, rule):
        values = _values(stacked, factors)
        if draft.values is not None:
            readers |= {name: partial(piece, tensor) for name, tensor in values.items()}
            continue
        for name, tensor in values.items():
            draft.module.get_parameter(name).detach().copy_(tensor)
    if draft.values is not None:
        loader = draft.values
        draft.values = ShardLoader({**loader.readers, **readers}, loader.tensors)
    seconds = time.monotonic() - started
    logger.info("%s: initial values of %d layers in %.1f s", rule.kind, len(layers), seconds)


def _computed(
    draft: Draft, layers: list[StackedLayer], rule: StartRule
) -> Iterator[tuple[StackedLayer, Factors]]:
    """The factors of each layer, each computed by one rank: all have the same bits of them."""
    world, seed = draft.world, draft.options.seed
    for first in range(0, len(layers), world.size):
        turn = layers[first : first + world.size]
        local_factors = None
        if world.rank < len(turn):
            stacked = turn[world.rank]
            local_factors = factors_of(
                rule.kind,
                _weight(draft, stacked),
                stacked.layer.r[TRAINED],
                stacked.scale,
                iterations=rule.iterations,
                # By name, so that values do not depend on which rank computes
                # them, nor on how many there are.
                seed=seed_of(seed, stacked.name),
            ).to(next(iter(stacked.factors("lora_A").values())).dtype)
        # Not strict: in the last turn there are fewer layers than ranks.
        yield from zip(turn, world.gathered(local_factors), strict=False)


def _weight(draft: Draft, stacked: StackedLayer) -> torch.Tensor:
    """The weight of a layer, [O, I], on this process's device."""
    base = stacked.layer.get_base_layer()
    weight = base.weight
    if draft.values is None:
        weight_OI = dequantized(base)
    else:
        names = {id(tensor): name for name, tensor in draft.values.tensors.items()}
        read = draft.values.readers[names[id(weight)]]
        weight_OI = read(Box.whole(tuple(weight.shape))).to(device())
    return weight_OI.T if stacked.layer.fan_in_fan_out else weight_OI


def _values(stacked: StackedLayer, factors: Factors) -> Mapping[str, torch.Tensor]:
    """The values of the trained and the frozen adapter, whose sum is 0."""
    a, b = f"{stacked.name}.lora_A", f"{stacked.name}.lora_B"
    return {
        f"{a}.{TRAINED}.weight": factors.a,
        f"{b}.{TRAINED}.weight": factors.b,
        f"{a}.{START}.weight": factors.a,
        f"{b}.{START}.weight": -factors.b,
    }


Tensors = Mapping[str, torch.Tensor]
_ALONG = {"lora_A": 0, "lora_B": 1}  # the dimension along which matrices are joined


@dataclass(frozen=True)
class StackedWeights(AdapterWeights):
    """Each layer's adapters in one pair of matrices, which are made for each save and are complete
    on every rank."""

    is_converted: ClassVar[bool] = True

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The joined matrices, and the live tensors that are no factors. A collective call if the
        model is sharded."""
        state = super().state_dict()
        for name, joined in self._joined().items():
            parts = [(self._complete(n, p), ratio) for n, p, ratio in joined.parts]
            scaled = [part if ratio == 1 else part * ratio for part, ratio in parts]
            state[name] = torch.cat(scaled, joined.dim)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Tensors) -> None:
        """Copy ``state`` into it. Raises ``CheckpointError`` if it is of another model."""
        live, joined = super().state_dict(), self._joined()
        expected_names = live.keys() | joined.keys()
        if odd := sorted(expected_names ^ state.keys()):
            raise CheckpointError(
                f"weights of another model: {counted(len(odd), 'tensor differs', 'tensors differ')}"
                f", for example {odd[0]}"
            )
        for name, tensor in state.items():
            if name in joined:
                self._divide(joined[name], tensor)
            elif tensor is not live[name]:
                live[name].copy_(tensor)

    def _joined(self) -> dict[str, _Joined]:
        """By name in files."""
        return {
            f"{stacked.name}.{part}.weight": _joined(stacked, part)
            for stacked in stacked_layers(self.model)
            for part in _ALONG
        }

    def _complete(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        """All values of a factor, on every rank."""
        local = local_box_of(name, parameter.detach(), self.cuts.get(name))
        if not isinstance(parameter, DTensor):
            return local.values
        full = torch.zeros(local.shape, dtype=local.values.dtype, device=local.values.device)
        if local.box.size:
            full[local.box.slices_in(Box.whole(local.shape))] = local.values
        bits = full.view(torch.uint8)  # whose sum with zeros has all bits, the sign of 0 included
        for axis in sorted(axes(self.cuts.get(name, ()))):
            group = parameter.device_mesh.get_group(axis)
            wait_for_ranks(dist.all_reduce, bits, group=group)
        return full

    def _divide(self, joined: _Joined, values: torch.Tensor) -> None:
        """Copy the parts of a joined matrix to their factors; those of frozen adapters that have
        other scales in files are never loaded from there."""
        start = 0
        for name, parameter, ratio in joined.parts:
            length = parameter.shape[joined.dim]
            local = local_box_of(name, parameter.detach(), self.cuts.get(name))
            if local.box.size and ratio == 1:
                part = values.narrow(joined.dim, start, length)
                local.values.copy_(part[local.box.slices_in(Box.whole(local.shape))])
            start += length


@dataclass(frozen=True)
class _Joined:
    """A matrix in files, made of several."""

    parts: Sequence[tuple[str, nn.Parameter, float]]  # with the factor to the scale of the first
    dim: int


def _joined(stacked: StackedLayer, part: str) -> _Joined:
    scales = stacked.layer.scaling
    ratios = [
        scales[adapter] / stacked.scale if part == "lora_B" else 1.0 for adapter in stacked.adapters
    ]
    factors = stacked.factors(part).items()
    parts = [(name, p, ratio) for (name, p), ratio in zip(factors, ratios, strict=True)]
    return _Joined(parts, _ALONG[part])
