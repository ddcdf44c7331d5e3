"""Batch sizes for a number of ranks: those of the recipe, or some that divide if it sets none."""

from __future__ import annotations

from dataclasses import replace

from ..data.order.micro_batches import fitting_micro_batch
from ..training.section import TrainSection
from .recipe import Recipe

_GLOBAL = TrainSection.global_batch_size
_MICRO = TrainSection.micro_batch_size


def with_batch_sizes(recipe: Recipe, num_data_ranks: int) -> tuple[Recipe, str | None]:
    """``recipe`` with default batch sizes changed so that they divide among the ranks, and what to
    log of it. Sizes that the recipe sets stay, divisible or not.

    A smaller micro-batch computes the same steps. The global batch is enlarged, to the next
    multiple of the ranks, only if it is the default and does not divide.
    """
    train = recipe.train
    size, micro = train.global_batch_size, train.micro_batch_size
    if size % (micro * num_data_ranks) == 0 or micro != _MICRO:
        return recipe, None
    if size == _GLOBAL:
        size = -(-size // num_data_ranks) * num_data_ranks
    if size % num_data_ranks:
        return recipe, None
    micro = fitting_micro_batch(size // num_data_ranks, micro)
    changes = {"global_batch_size": size, "micro_batch_size": micro}
    said = [
        f"train.{name}: {value}" for name, value in changes.items() if value != getattr(train, name)
    ]
    changed = replace(train, global_batch_size=size, micro_batch_size=micro)
    return (
        replace(recipe, train=changed),
        f"{', '.join(said)} (not set; chosen for {num_data_ranks} data-parallel ranks)",
    )
