"""Batch sizes for a number of ranks: those that the recipe sets, or some that divide."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ..data.order.micro_batches import fitting_micro_batch
from ..schema import Unset
from ..training.section import TrainSection
from .recipe import Recipe


def with_batch_sizes(recipe: Recipe, num_data_ranks: int) -> tuple[Recipe, str | None]:
    """``recipe`` with batch sizes that divide among the ranks in place of those that it does not
    set, and what to log of the change. Sizes that it sets stay, divisible or not.

    A smaller micro-batch computes the same steps. The global batch is enlarged, and only if no
    smaller micro-batch makes it divide.
    """
    train = recipe.train
    size = _global_batch(train, num_data_ranks)
    micro = _micro_batch(train, size, num_data_ranks)
    chosen = {"global_batch_size": size, "micro_batch_size": micro}
    changed_sizes = [
        f"train.{name}: {value}" for name, value in chosen.items() if value != getattr(train, name)
    ]
    if not changed_sizes:
        return recipe, None
    changed = replace(train, global_batch_size=size, micro_batch_size=micro)
    return (
        replace(recipe, train=changed),
        f"{', '.join(changed_sizes)} (not set; chosen for {num_data_ranks} data-parallel ranks)",
    )


def _global_batch(train: TrainSection, num_ranks: int) -> int:
    """The examples of a step: as set, or the next multiple of what cannot be made smaller."""
    size, micro = train.global_batch_size, train.micro_batch_size
    if not isinstance(size, Unset):
        return size
    least = num_ranks if isinstance(micro, Unset | str) else num_ranks * micro
    return -(-size // least) * least


def _micro_batch(train: TrainSection, size: int, num_ranks: int) -> int | Literal["auto"]:
    """The examples of a micro-batch: as set, or the most that divide those of a rank."""
    micro = train.micro_batch_size
    if not isinstance(micro, Unset) or size % num_ranks:
        return micro
    return fitting_micro_batch(size // num_ranks, micro)
