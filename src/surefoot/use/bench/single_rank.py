"""The work of one rank of a run: its share of the examples, on the full model."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from ...data.order.micro_batches import check_divides
from ...errors import RecipeError, RunError
from ...parallel.launcher import num_processes
from ...parallel.section import ParallelSection, launched
from ...recipe.batch_sizes import with_batch_sizes
from ...recipe.recipe import Recipe

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SingleRankRecipe:
    """A recipe for one rank, and the number of ranks for which it stands."""

    recipe: Recipe
    num_processes: int


def alone(recipe: Recipe) -> SingleRankRecipe:
    """The share of one rank.

    Raises ``RecipeError`` if the ranks do not form the mesh, ``DataError`` if they do not divide
    the batch, ``RunError`` if a launcher has started several.
    """
    if (found := launched()) is not None and found[1] > 1:
        raise RunError(
            f"surefoot bench measures one rank, but {found[1]} were started; start it without "
            "torchrun or srun"
        )
    count = 1 if found is not None else num_processes(recipe.parallel)
    try:
        ranks = recipe.parallel.num_data_ranks(count)
    except ValueError as error:
        raise RecipeError(f"parallel: {error}") from None
    recipe, note = with_batch_sizes(recipe, ranks)
    if note is not None:
        logger.info("%s", note)
    train = recipe.train
    check_divides(train.global_batch_size, train.fixed_micro_batch_size, ranks)
    one = replace(train, global_batch_size=train.global_batch_size // ranks)
    return SingleRankRecipe(replace(recipe, train=one, parallel=ParallelSection()), count)
