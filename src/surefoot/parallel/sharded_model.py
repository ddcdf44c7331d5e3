"""Shard a model: first its matrices over the axis ``tp``, then over the other axes with FSDP2. The
sharding of each tensor is recorded.

Gradients are summed over the ranks, never averaged: the step divides once, by the weight of the
complete window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from .collectives import MeshAxis
from .mesh import DATA_AXES
from .section import ParallelSection
from .sharding import AxisShard, Cuts
from .tensor.tensor_parallel import cut_tensors
from .tensor.tp_plan import LayerRange
from .world import World

if TYPE_CHECKING:  # half of all imports, and here only a name
    from transformers import PreTrainedModel


def shard(
    model: nn.Module,
    inner: PreTrainedModel,
    world: World,
    section: ParallelSection,
    *,
    dtype: torch.dtype | None,
    stages: Sequence[LayerRange] | None = None,
) -> dict[str, Cuts]:
    """Shard ``model`` in place, layer by layer; returns the sharding of each parameter, by name.
    Does nothing for a single rank.

    Args:
        model: unsharded, with the same values on every rank.
        inner: the same without its adapter.
        world: the mesh over which to shard it.
        section: whether a layer is gathered again for the backward pass.
        dtype: of weights when they are gathered and multiplied; gradients are summed in float32.
            None: unchanged.
        stages: the layers of each pipeline stage on this rank; None: all layers.
    """
    if world.mesh is None:
        return {}
    cut: dict[nn.Parameter, tuple[AxisShard, ...]] = {}
    if world.tp > 1:
        stretches = stages or [LayerRange(layers(inner))]
        between = stretches if section.sequence_parallel else ()
        cut = cut_tensors(inner, MeshAxis(world.mesh["tp"]), between)
    cuts: dict[str, Cuts] = {
        name: (*cut.get(p, ()), AxisShard("dp_shard", 0)) for name, p in model.named_parameters()
    }
    mesh = world.mesh[DATA_AXES]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    again = section.reshard_after_forward
    for layer in layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=again, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=again, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other way to divide by 1
    return cuts


def layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers: the elements of the longest list of modules that is in no other list."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    blocks = [*max(lists, key=_num_parameters)] if lists else []
    return [block for block in blocks if _num_parameters(block)]  # of a pipeline's stage, its own


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def reduce_gradients(model: nn.Module, *, now: bool) -> None:
    """Whether the next backward pass sums the gradients over ranks, or only accumulates them."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
        model.set_is_last_backward(now)


def keep_ends_gathered(model: nn.Module) -> None:
    """Leave the weights outside of the layers gathered after a forward pass."""
    if isinstance(model, FSDPModule):
        model.set_reshard_after_forward(False, recurse=False)


def gather_nothing(model: nn.Module) -> None:
    """Free what a forward pass without a backward pass has left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
