"""Other settings of a recipe that the result hardly depends on, but memory and time do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..recipe.recipe import Recipe


@dataclass(frozen=True)
class Change:
    """One other setting, and whether it makes the run faster or slower."""

    values: Mapping[str, object]  # by dotted path
    recipe: Recipe
    effect: str
    is_faster: bool


def changes(recipe: Recipe, num_processes: int) -> Iterator[Change]:
    """Every single change: how the processes are laid out, recomputation, the size of a pass."""
    yield from _splits(recipe, num_processes)
    recomputes = not recipe.model.gradient_checkpointing
    yield Change(
        {"model.gradient_checkpointing": recomputes},
        replace(recipe, model=replace(recipe.model, gradient_checkpointing=recomputes)),
        "about a fifth slower" if recomputes else "about a fifth faster",
        not recomputes,
    )
    size, whole = recipe.train.micro_batch_size, recipe.train.global_batch_size
    if size % 2 == 0:
        yield _resized(recipe, size // 2, "more and smaller passes", is_faster=False)
    if whole % (2 * size * num_processes) == 0:
        yield _resized(recipe, 2 * size, "fewer and larger passes", is_faster=True)


def _resized(recipe: Recipe, size: int, effect: str, *, is_faster: bool) -> Change:
    changed = replace(recipe, train=replace(recipe.train, micro_batch_size=size))
    return Change({"train.micro_batch_size": size}, changed, effect, is_faster)


def _splits(recipe: Recipe, num_processes: int) -> Iterator[Change]:
    """The other ways to lay so many processes out."""
    _, _, now, _ = recipe.parallel.axes(num_processes)
    for shard in range(1, num_processes + 1):
        if num_processes % shard or shard == now:
            continue
        replicate = num_processes // shard
        section = replace(recipe.parallel, dp_replicate=replicate, dp_shard=shard)
        effect = "less communication" if shard < now else "more communication"
        values = {"parallel.dp_replicate": replicate, "parallel.dp_shard": shard}
        yield Change(values, replace(recipe, parallel=section), effect, shard < now)
