"""What one process of a run does: its share of the examples, on the whole model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...errors import RecipeError, RunError
from ...parallel.launch import num_processes
from ...parallel.section import ParallelSection
from ...parallel.world import launched
from ...recipe.recipe import Recipe


@dataclass(frozen=True)
class SingleRankRecipe:
    """A recipe for one process, and of how many it stands for one."""

    recipe: Recipe
    num_processes: int


def alone(recipe: Recipe) -> SingleRankRecipe:
    """The share of one process.

    Raises:
        RecipeError: the processes do not make the mesh, or do not divide the batch.
        RunError: a launcher has started several processes.
    """
    if (found := launched()) is not None and found[1] > 1:
        raise RunError(
            f"surefoot bench measures one process, but {found[1]} were started; start it without "
            "torchrun or srun"
        )
    count = 1 if found is not None else num_processes(recipe.parallel)
    try:
        _, replicate, shard, _ = recipe.parallel.axes(count)
    except ValueError as error:
        raise RecipeError(f"parallel: {error}") from None
    train, ranks = recipe.train, replicate * shard
    if train.global_batch_size % (train.micro_batch_size * ranks):
        raise RecipeError(
            f"train.global_batch_size ({train.global_batch_size}) must be a multiple of "
            f"micro_batch_size x ranks ({train.micro_batch_size} x {ranks})"
        )
    one = replace(train, global_batch_size=train.global_batch_size // ranks)
    return SingleRankRecipe(replace(recipe, train=one, parallel=ParallelSection()), count)
