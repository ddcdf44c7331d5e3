"""Other settings of a recipe that the result hardly depends on, but memory and time do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ...recipe.recipe import Recipe

_MOST_TENSORS = 8  # processes of tp: beyond those of one machine it is too slow


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
    yield from _tensors(recipe, num_processes)
    yield from _pipelines(recipe, num_processes)
    recomputes = not recipe.model.gradient_checkpointing
    yield Change(
        {"model.gradient_checkpointing": recomputes},
        replace(recipe, model=replace(recipe.model, gradient_checkpointing=recomputes)),
        "about a fifth slower" if recomputes else "about a fifth faster",
        not recomputes,
    )
    size, whole = recipe.train.micro_batch_size, recipe.train.global_batch_size
    num_data_ranks = num_processes // recipe.parallel.tp // recipe.parallel.pp
    if size % 2 == 0:
        yield _resized(recipe, size // 2, "more and smaller passes", is_faster=False)
    if whole % (2 * size * num_data_ranks) == 0:
        yield _resized(recipe, 2 * size, "fewer and larger passes", is_faster=True)


def _resized(recipe: Recipe, size: int, effect: str, *, is_faster: bool) -> Change:
    changed = replace(recipe, train=replace(recipe.train, micro_batch_size=size))
    return Change({"train.micro_batch_size": size}, changed, effect, is_faster)


def _splits(recipe: Recipe, num_processes: int) -> Iterator[Change]:
    """The other ways to lay so many processes out over examples."""
    _, replicate, now, _ = recipe.parallel.axes(num_processes)
    count = replicate * now
    for shard in range(1, count + 1):
        if count % shard or shard == now:
            continue
        replicate = count // shard
        effect = "less communication" if shard < now else "more communication"
        values = {"dp_replicate": replicate, "dp_shard": shard}
        yield _laid_out(recipe, values, effect, is_faster=shard < now)


def _tensors(recipe: Recipe, num_processes: int) -> Iterator[Change]:
    """Twice and half as many processes that share every matrix, and tokens cut as well."""
    pp, replicate, shard, tp = recipe.parallel.axes(num_processes)
    if tp > 1 and pp == 1 and not recipe.parallel.sequence_parallel:
        yield _laid_out(recipe, {"sequence_parallel": True}, "as much communication")
    if shard % 2 == 0 and 2 * tp <= _MOST_TENSORS:
        values = {"dp_shard": shard // 2, "tp": 2 * tp}
        yield _laid_out(recipe, values, "more communication")
    if tp % 2 == 0 and _divides(recipe, 2 * replicate * shard):
        values = {"dp_shard": 2 * shard, "tp": tp // 2}
        values |= (
            {"sequence_parallel": False} if recipe.parallel.sequence_parallel and tp == 2 else {}
        )
        yield _laid_out(recipe, values, "less communication", is_faster=True)


def _pipelines(recipe: Recipe, num_processes: int) -> Iterator[Change]:
    """Of a pipeline, twice and half as many processes that share the layers out."""
    pp, replicate, shard, _ = recipe.parallel.axes(num_processes)
    if pp > 1 and shard % 2 == 0:
        yield _laid_out(recipe, {"dp_shard": shard // 2, "pp": 2 * pp}, "waits more")
    if pp % 2 == 0 and _divides(recipe, 2 * replicate * shard):
        values = {"dp_shard": 2 * shard, "pp": pp // 2}
        yield _laid_out(recipe, values, "waits less, more communication", is_faster=True)


def _divides(recipe: Recipe, num_data_ranks: int) -> bool:
    """Whether so many can share the examples of a step evenly."""
    train = recipe.train
    return train.global_batch_size % (train.micro_batch_size * num_data_ranks) == 0


def _laid_out(
    recipe: Recipe, values: Mapping[str, object], effect: str, *, is_faster: bool = False
) -> Change:
    section = replace(recipe.parallel, **values)  # type: ignore[arg-type]
    changed = replace(recipe, parallel=section)
    return Change({f"parallel.{n}": v for n, v in values.items()}, changed, effect, is_faster)
