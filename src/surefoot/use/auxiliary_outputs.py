"""What auxiliary models compute for examples to evaluate on, kept in the cache of training; and
those that stay beside the model that is evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Literal

from ..batch import Features
from ..data.store.dataset import in_memory
from ..data.text.codec import Codec
from ..errors import RecipeError
from ..model.loading import resolve
from ..model.section import ModelSection
from ..network.network import Network
from ..parallel.section import ParallelSection
from ..parallel.world import ALONE, World
from ..recipe.recipe import Recipe
from ..recipe.recipe_data import open_codec
from ..run.contexts import columns_of, context_of, eval_set
from ..run.models import heads_of, refuse_other_tokens
from ..training.precompute import Precomputation, WindowSet, model_of, with_items, with_windows
from ..training.stage import POLICY, auxiliary_models, longest_row
from .evaluation import encoded, ready_to_measure
from .held_out_set import held_out
from .model_loading import PLAINLY, open_start


def auxiliary_columns(
    recipe: Recipe,
    *,
    dataset: str | None = None,
    limit: int | None = None,
    world: World = ALONE,
    parallel: ParallelSection = PLAINLY,
) -> dict[str, list[Features]]:
    """The columns of each example to evaluate on (see ``held_out``), by the name of the dataset;
    nothing if the stage has no auxiliary models. None of these is left in memory."""
    if not auxiliary_models(recipe.stage, "ahead"):
        return {}
    with world.main_first():  # which downloads, and fills the cache
        base = resolve(recipe.model)
        codec = open_codec(recipe, base)
        parts = held_out(recipe, codec, dataset=dataset, limit=limit)
    items = {one.name: in_memory(encoded(recipe.stage, one.examples, codec)) for one in parts}
    size = recipe.train.global_batch_size
    sets = {name: eval_set(examples, size) for name, examples in items.items()}
    found = columns_of(recipe, {POLICY: base}, list(sets.values()), world)
    if not found.is_complete:
        longest = max(int(dataset.lengths.max(initial=0)) for dataset in items.values())
        longest = longest_row(recipe.stage, longest, recipe.data.longest)
        with _networks(recipe, "ahead", codec, world, parallel, longest) as networks:
            found.run(context_of(recipe, codec, networks, ALONE, recipe.train.seed))
    return {name: _columns(one, found) for name, one in sets.items()}


@contextmanager
def staying(
    recipe: Recipe, codec: Codec, world: World, parallel: ParallelSection
) -> Iterator[dict[str, Network]]:
    """The auxiliary models that stay beside the model that is evaluated, by role. Raises
    ``RecipeError`` if the model is compared with one of them on several ranks, which share the
    logits of a model."""
    if recipe.stage.spec.divergence is not None and world.size > 1:
        raise RecipeError(
            f"parallel: two distributions over the vocabulary are compared on one rank, not on "
            f"{world.size}; evaluate this run on one process"
        )
    longest = recipe.data.longest + recipe.stage.max_new_tokens
    with _networks(recipe, "window", codec, world, parallel, longest) as networks:
        yield networks


@contextmanager
def _networks(
    recipe: Recipe,
    when: Literal["ahead", "window"],
    codec: Codec,
    world: World,
    parallel: ParallelSection,
    longest: int,
) -> Iterator[dict[str, Network]]:
    """The auxiliary models of the stage, by role; roles of the same model share it."""
    opened: dict[ModelSection, Network] = {}
    needed = auxiliary_models(recipe.stage, when)
    roles = {role: model_of(one, recipe.model) for role, one in needed.items()}
    with ExitStack() as stack:
        for role, model in roles.items():
            if model not in opened:
                heads = heads_of(needed[role], model, resolve(model))
                other = replace(recipe, model=model)
                start = open_start(other, world=world, parallel=parallel, heads=heads)
                refuse_other_tokens(recipe, role, start.tokenizer, codec)
                ready = ready_to_measure(start, recipe, longest)
                opened[model] = stack.enter_context(ready)
        yield {role: opened[model] for role, model in roles.items()}


def _columns(one: WindowSet, found: Precomputation) -> list[Features]:
    """The computed columns of each example of an evaluation, in order."""
    items, kept = with_items(one.items, found), with_windows(one, found)
    loaded = one.items[0]
    columns: list[Features] = []
    for place, group in one.windows.items():
        added = kept.added(place, [items[int(item)] for item in group])
        columns += [{n: v for n, v in item.items() if n not in loaded} for item in added]
    return columns
