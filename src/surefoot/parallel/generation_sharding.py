"""Shard a model for generation: tensor parallelism over ``tp``, then FSDP over ``dp_shard``.

Ranks that generate together must sample the same next token, or they would wait for each other
forever. So the logits of one position per prompt are gathered from all shards, and are bitwise the
same on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from .collectives import MeshAxis, gather_from_tp_region
from .launch_environment import launched
from .section import ParallelSection
from .sharded_model import layers
from .sharding import AxisShard, Cuts
from .tensor.tensor_parallel import AXIS, cut_tensors
from .tensor.tp_plan import cuts_vocabulary
from .world import World

if TYPE_CHECKING:  # half of all imports, and here only a name
    from transformers import PreTrainedModel

_SHARDS = "dp_shard"


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
    along_tp = cut_tensors(model, MeshAxis(world.mesh[AXIS])) if world.tp > 1 else {}
    cuts: dict[str, Cuts] = {n: along_tp.get(p, ()) for n, p in model.named_parameters()}
    axes = [axis for axis in (AXIS, _SHARDS) if world.axes[axis] > 1]
    model.get_output_embeddings().forward = _full_logits(model, world, axes)
    if world.axes[_SHARDS] > 1:
        cuts = {name: (*found, AxisShard(_SHARDS, 0)) for name, found in cuts.items()}  # type: ignore[misc]
        for module in (*layers(model), model):
            fully_shard(
                module,
                mesh=world.mesh[_SHARDS],
                reshard_after_forward=section.reshard_after_forward,
            )
    return cuts


@contextmanager
def full_logits(model: PreTrainedModel, world: World) -> Iterator[None]:
    """While it lasts, the head of a model that is trained gives the same full logits to all ranks
    of ``tp``."""
    if world.tp == 1:
        yield
        return
    head = model.get_output_embeddings()
    own = vars(head).get("forward")
    head.forward = _full_logits(model, world, [AXIS])
    try:
        yield
    finally:
        del head.forward
        if own is not None:
            head.forward = own


def _full_logits(
    model: PreTrainedModel, world: World, axes: Sequence[str]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward pass of the head that gives the same full logits to all ranks along ``axes``."""
    assert world.mesh is not None
    head, mesh = model.get_output_embeddings(), world.mesh
    own, is_cut = head.forward, world.tp > 1 and cuts_vocabulary(model)
    size = model.config.get_text_config().vocab_size
    shared = list(axes)
    if is_cut:
        shared.remove(AXIS)  # gathered from all, they are the same already

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = own(hidden)
        if is_cut:
            logits = gather_from_tp_region(logits, MeshAxis(mesh[AXIS]), size)
        for axis in shared:
            logits = _of_the_first(logits, mesh[axis])
        return logits

    return forward


def _of_the_first(values: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """The value of the first rank along ``axis``."""
    values = values.contiguous()
    dist.broadcast(values, group=axis.get_group(), group_src=0)
    return values
