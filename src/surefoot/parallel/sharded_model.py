"""Shard a model: first its matrices over the axis ``tp``, then over the other axes with FSDP2. The
sharding of each tensor is recorded.

Gradients are summed over the ranks, never averaged: the step divides once, by the weight of the
complete window.

For generation a model is sharded by tensor parallelism over ``tp``, then by FSDP over ``dp_shard``.
Ranks that generate together must sample the same next token. So the logits of one position per
prompt are gathered from all shards, and are bitwise the same on each rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from ._collectives import gather_from_tp_region
from .progress import wait_for_ranks
from .section import ParallelSection, launched
from .sharding import DATA_AXES, AxisShard, Cuts
from .tensor_parallel import AXIS, cut_tensors
from .tp_plan import LayerRange, cuts_vocabulary
from .world import World, local

if TYPE_CHECKING:
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
        cut = cut_tensors(inner, world.along("tp"), between)
    cuts: dict[str, Cuts] = {
        name: (*cut.get(p, ()), AxisShard("dp_shard", 0)) for name, p in model.named_parameters()
    }
    mesh = world.mesh[DATA_AXES]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    reshards = section.reshard_after_forward
    for layer in layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshards, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshards, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Summed, never averaged: the step divides once, by the weight of the whole window.
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


def with_replicas(section: ParallelSection, count: int | None = None) -> ParallelSection:
    """``section`` for ``count`` ranks, by default all that a launcher has started: those that
    ``tp`` and ``dp_shard`` leave hold replicas of the model."""
    count = count or (launched() or (0, 1, 0))[1]
    shards = section.dp_shard or 1
    copies = section.dp_replicate
    if copies == 1:
        copies = max(1, count // (shards * section.tp))
    return replace(section, num_processes=None, dp_shard=shards, dp_replicate=copies)


def shard_for_generation(
    model: PreTrainedModel, world: World, section: ParallelSection
) -> dict[str, Cuts]:
    """Shard ``model``, without the wrapper of an adapter, in place; returns the sharding of each
    parameter, by name. Along ``dp_replicate`` there are full replicas. Raises ``RecipeError`` if
    the architecture cannot be sharded over ``tp``."""
    if world.mesh is None:
        return {}
    model.requires_grad_(False)  # so that an adapter may have another type than its base
    along_tp = cut_tensors(model, world.along(AXIS)) if world.tp > 1 else {}
    cuts: dict[str, Cuts] = {n: along_tp.get(p, ()) for n, p in model.named_parameters()}
    axes = [axis for axis in (AXIS, "dp_shard") if world.size_along(axis) > 1]
    model.get_output_embeddings().forward = _full_logits(model, world, axes)
    if "dp_shard" in axes:
        cuts = {name: (*tp_cuts, AxisShard("dp_shard", 0)) for name, tp_cuts in cuts.items()}  # type: ignore[misc]
        mesh, reshards = world.mesh["dp_shard"], section.reshard_after_forward
        for module in (*layers(model), model):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshards)
    return cuts


@contextmanager
def full_logits(model: PreTrainedModel, world: World) -> Iterator[None]:
    """While it lasts, the head of a model that is trained gives the same full logits to all ranks
    of ``tp``."""
    if world.tp == 1:
        yield
        return
    head = model.get_output_embeddings()
    own_forward = vars(head).get("forward")
    head.forward = _full_logits(model, world, [AXIS])
    try:
        yield
    finally:
        del head.forward
        if own_forward is not None:
            head.forward = own_forward


def _full_logits(
    model: PreTrainedModel, world: World, axes: Sequence[str]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward pass of the head that gives the same full logits to all ranks along ``axes``."""
    assert world.mesh is not None
    head, mesh = model.get_output_embeddings(), world.mesh
    own_forward, is_cut = head.forward, world.tp > 1 and cuts_vocabulary(model)
    size = model.config.get_text_config().vocab_size
    shared = list(axes)
    if is_cut:
        shared.remove(AXIS)  # gathered from all, they are the same already

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = own_forward(hidden)
        if is_cut:
            logits = gather_from_tp_region(logits, world.along(AXIS), size)
        for axis in shared:  # ranks that sampled other tokens would wait for each other forever
            logits = logits.contiguous()
            group = mesh[axis].get_group()
            wait_for_ranks(dist.broadcast, logits, group=group, group_src=0)
        return logits

    return forward


def global_norm(
    gradients: Sequence[torch.Tensor],
    totals: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
) -> torch.Tensor:
    """The Euclidean norm of all elements of all ``gradients``, which are on ``device``.

    Each rank sums its own shards, then one all-reduce. DTensor would use one all-reduce per mesh
    axis, log a warning, and spend most of the first step on planning it.

    Each rank sums its own shards, then ``totals`` sums over all ranks: one all-reduce, where
    DTensor would use one for each axis of the mesh, log a warning, and spend most of the first step
    on planning it. Replicated values count once. The sum is float64 on every rank,
    even without gradients, so all ranks clip with the same bits.
    """
    if not gradients:  # here; another stage of a pipeline may have some
        return totals(torch.zeros(1, dtype=torch.float64, device=device)).sqrt()[0]
    if not any(isinstance(gradient, DTensor) for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    by_copies: dict[int, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_copies.setdefault(_copies(gradient), []).append(local(gradient))
    shares = [
        torch.stack(torch._foreach_norm(local_gradients)).double().square().sum() / copies
        for copies, local_gradients in by_copies.items()
    ]
    return totals(torch.stack(shares).sum()[None]).sqrt()[0]


def _copies(gradient: torch.Tensor) -> int:
    """The number of ranks with the same shard."""
    assert isinstance(gradient, DTensor)
    axes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in axes if isinstance(placement, Replicate))
