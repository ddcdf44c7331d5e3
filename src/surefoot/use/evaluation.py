"""How good a model is on examples it has not seen, measured as training measures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np

from ..batch import Features, Probe
from ..data.example import Dropped, Example, Truncated
from ..data.media.batch_media import has_pictures
from ..data.rows.catalog import Catalog
from ..data.rows.rows import Reading, read_rows
from ..data.section import DataSection
from ..data.store.dataset import EncodedDataset, in_memory
from ..data.text.codec import Codec
from ..data.text.templates import section_template
from ..data.training_data import open_stream, prepare
from ..errors import DataError, ModelError, RecipeError
from ..model.isolation import PromptSharing, packed_meanwhile
from ..model.loading import resolve
from ..model.numerics import autocast, choose
from ..model.section import ModelSection
from ..network.network import Network
from ..parallel.section import ParallelSection
from ..parallel.world import ALONE, World
from ..recipe.recipe import Recipe
from ..recipe.recipe_data import encoding_of, fitted_data, open_codec, reading_of, why_text
from ..run.contexts import build_evaluation, columns_of, context_of, eval_set
from ..run.models import refuse_other_tokens
from ..run.parts import RunParts
from ..training.evaluation import EvaluationSet
from ..training.precompute import (
    NOTHING,
    Precomputation,
    WindowSet,
    with_items,
    with_windows,
)
from ..training.stage import POLICY, Stage, auxiliary_models, longest_row
from .model_loading import PLAINLY, LoadedModel, open_start, refuse_reward_model

logger = logging.getLogger(__name__)


def adopt(opened: LoadedModel, recipe: Recipe) -> LoadedModel:
    """``opened`` with the recipe's settings; with its template, too, if the model has none. Raises
    ``RecipeError`` if ``data.cutoff_len`` is more than the model has positions."""
    if not recipe.stage.spec.is_reward:
        refuse_reward_model(opened)
    folder = Path(opened.inner.name_or_path)
    recipe = replace(recipe, data=fitted_data(recipe.data, opened.inner.config, folder))
    template = opened.template
    if not recipe.stage.uses_template:
        template = None
    elif template is None:
        template = section_template(recipe.data, opened.tokenizer)
    adopted = replace(opened, recipe=recipe, template=template)
    if recipe.stage.reads_pictures:
        return adopted
    return replace(adopted, media=None, why_text=why_text())


def measure(
    opened: LoadedModel,
    recipe: Recipe,
    examples: Sequence[Example],
    *,
    columns: Sequence[Features] | None = None,
    others: Mapping[str, Network] = MappingProxyType({}),
    on_batch: Callable[[], None] | None = None,
) -> dict[str, float]:
    """The metrics of training's evaluations, the same on all ranks: loss, perplexity and token
    accuracy, say. ``columns`` are those that auxiliary models compute for each example, if the
    stage has any (see ``auxiliary_columns``), ``others`` the models that the policy is compared
    with, by role (see ``staying``)."""
    items = encoded(recipe.stage, examples, opened.codec)
    if columns is not None:
        items = _with_columns(items, columns)
    encoded_length = max(len(item["input_ids"]) for item in items)
    longest = longest_row(recipe.stage, encoded_length, recipe.data.longest)
    parts = RunParts.around(recipe, opened.codec, Path(opened.inner.name_or_path))
    probes = parts.picture_probes() if has_pictures(items) else ()
    with ready_to_measure(opened, recipe, longest, probes) as network:
        # ranks that share a network run in step, so each computes all batches
        networks = {POLICY: network.compared_with(others) if others else network, **others}
        evaluation = build_evaluation(parts, networks, ALONE)
        return evaluation.measure(EvaluationSet(items, NOTHING), on_batch or (lambda: None))


def num_batches(recipe: Recipe, num_examples: int) -> int:
    """The approximate number of batches of ``measure``."""
    return -(-num_examples // recipe.train.fixed_micro_batch_size)


def encoded(stage: Stage, examples: Sequence[Example], codec: Codec) -> list[Features]:
    """The examples as ``stage`` reads them; drops are logged. Raises ``DataError`` if all are."""
    outcomes = stage.encode(examples, codec)
    dropped = [outcome for outcome in outcomes if isinstance(outcome, Dropped)]
    if len(dropped) == len(outcomes):
        reason = dropped[0].reason if dropped else "there are none"
        raise DataError(f"no example of {len(outcomes)} can be evaluated: {reason}")
    if dropped:
        logger.warning(
            "dropped %d of %d examples: %s", len(dropped), len(outcomes), dropped[0].reason
        )
    usable = (outcome for outcome in outcomes if not isinstance(outcome, Dropped))
    return [f for o in usable for f in (o.features if isinstance(o, Truncated) else o)]


@contextmanager
def ready_to_measure(
    opened: LoadedModel, recipe: Recipe, longest: int = 0, probes: Sequence[Probe] = ()
) -> Iterator[Network]:
    """While it lasts, the network of ``opened`` has the recipe's precision, and attention for rows
    of documents of up to ``longest`` tokens, and of pictures as in ``probes``."""
    inner, device = opened.inner, opened.device
    with ExitStack() as stack:
        is_proven = recipe.data.packing and stack.enter_context(
            packed_meanwhile(inner, longest, probes)
        )
        stack.enter_context(autocast(choose(recipe.train.precision), device))
        yield replace(opened.network, sharing=PromptSharing(is_proven))


def _with_columns(items: Sequence[Features], columns: Sequence[Features]) -> list[Features]:
    if len(columns) != len(items):
        raise DataError(
            f"the reference has read {len(columns)} examples, this model reads {len(items)} of "
            "them: their tokenizers differ too much to be compared"
        )
    return [{**item, **more} for item, more in zip(items, columns, strict=True)]


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
    items = {part.name: in_memory(encoded(recipe.stage, part.examples, codec)) for part in parts}
    size = recipe.train.global_batch_size
    sets = {name: eval_set(examples, size) for name, examples in items.items()}
    run = RunParts.around(recipe, codec, base)
    precomputation = columns_of(run, list(sets.values()), world)
    if not precomputation.is_complete:
        longest = max(int(dataset.lengths.max(initial=0)) for dataset in items.values())
        longest = longest_row(recipe.stage, longest, recipe.data.longest)
        with _networks(recipe, "ahead", run, world, parallel, longest) as networks:
            precomputation.run(context_of(run, networks, ALONE))
    return {name: _columns(window_set, precomputation) for name, window_set in sets.items()}


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
    parts = RunParts.around(recipe, codec, Path(recipe.model.path))
    with _networks(recipe, "window", parts, world, parallel, longest) as networks:
        yield networks


@contextmanager
def _networks(
    recipe: Recipe,
    when: Literal["ahead", "window"],
    parts: RunParts,
    world: World,
    parallel: ParallelSection,
    longest: int,
) -> Iterator[dict[str, Network]]:
    """The auxiliary models of the stage, by role; roles of the same model share it."""
    opened: dict[ModelSection, Network] = {}
    roles = {role: parts.models.auxiliary(role) for role in auxiliary_models(parts.stage, when)}
    with ExitStack() as stack:
        for role, model in roles.items():
            if model.section not in opened:
                other, heads = replace(recipe, model=model.section), model.options.heads
                start = open_start(other, world=world, parallel=parallel, heads=heads)
                refuse_other_tokens(parts.models, role, start.tokenizer, parts.codec)
                ready = ready_to_measure(start, recipe, longest, parts.picture_probes())
                opened[model.section] = stack.enter_context(ready)
        yield {role: opened[model.section] for role, model in roles.items()}


def _columns(window_set: WindowSet, precomputation: Precomputation) -> list[Features]:
    """The computed columns of each example of an evaluation, in order."""
    items = with_items(window_set.items, precomputation)
    cached = with_windows(window_set, precomputation)
    loaded = window_set.items[0]
    columns: list[Features] = []
    for place, group in window_set.windows.items():
        added = cached.added(place, [items[int(item)] for item in group])
        columns += [{n: v for n, v in item.items() if n not in loaded} for item in added]
    return columns


VAL = "held out"  # what val_size takes from the training datasets
Rows = Mapping[str, Sequence[int]]  # dataset -> its rows, ascending


@dataclass(frozen=True)
class HeldOut:
    """Examples to evaluate on, under the name of their dataset."""

    name: str
    examples: Sequence[Example]


def held_out(
    recipe: Recipe, codec: Codec, *, dataset: str | None = None, limit: int | None = None
) -> list[HeldOut]:
    """The evaluation examples of a recipe, at most ``limit`` rows of each set: its
    ``eval_datasets``, or what ``val_size`` holds out, or ``dataset`` (of a training dataset, only
    what is held out). ``codec`` determines which rows are usable if the recipe's own model no
    longer exists. Raises ``RecipeError`` if there is nothing, ``DataError`` if a dataset is missing
    or broken."""
    codec = own_codec(recipe, codec)
    section, limited = recipe.data, partial(_first, limit=limit)
    read = partial(_examples, section, reading=reading_of(recipe.stage, codec))
    names = [str(name) for name in section.eval_datasets] if dataset is None else [dataset]
    if dataset and dataset in section.datasets and dataset not in section.eval_datasets:
        if section.val_size:
            rows = {dataset: _split(recipe, codec)[dataset]}
            return [HeldOut(dataset, read(limited(rows)))]
        logger.warning(
            "dataset %r is used for training: its evaluation metrics do not measure generalization",
            dataset,
        )
    if names:
        each = ((name, {name: _rows_of(recipe, codec, name)}) for name in names)
        return [HeldOut(name, read(limited(rows))) for name, rows in each]
    if not section.val_size:
        raise RecipeError(
            "nothing to evaluate on; set data.val_size or data.eval_datasets, or name a dataset "
            "with --dataset"
        )
    rows = _split(recipe, codec)
    return [HeldOut(VAL, read(limited(rows)))]


def own_codec(recipe: Recipe, fallback: Codec) -> Codec:
    """The recipe's own encoding: another model must not change what is held out."""
    try:
        folder = resolve(recipe.model)
    except ModelError:
        return fallback
    codec = open_codec(recipe, folder)
    if recipe.stage.uses_template:
        codec.tokenizer.chat_template = codec.template.source
    return codec


def _rows_of(recipe: Recipe, codec: Codec, name: str) -> list[int]:
    """The rows of a dataset with trained tokens."""
    reference = recipe.data.reference(name)
    section = replace(
        recipe.data,
        datasets=(reference,),
        eval_datasets=(),
        val_size=0.0,
        mix_strategy="concat",
        interleave_probs=None,
    )
    (rows,) = _rows(prepare(encoding_of(recipe, codec, section)).train)
    return rows


def _split(recipe: Recipe, codec: Codec) -> dict[str, list[int]]:
    """The rows that ``val_size`` holds out, by dataset."""
    if recipe.data.streaming:
        stream = open_stream(encoding_of(recipe, codec))
        numbers = stream.train.rows(int(stream.held[-1]) + 1)[stream.held]
        return dict(stream.train.rows_by_dataset(numbers))
    rows = _rows(prepare(encoding_of(recipe, codec)).evals[""])
    return dict(zip(map(str, recipe.data.datasets), rows, strict=True))


def _rows(dataset: EncodedDataset) -> list[list[int]]:
    """The rows of each store that the dataset uses."""
    starts = np.cumsum([0, *(len(store) for store in dataset.stores)])
    rows_by_store = []
    for store, start in zip(dataset.stores, starts, strict=False):
        inside = (dataset.index >= start) & (dataset.index < start + len(store))
        rows_by_store.append(np.unique(store.rows[dataset.index[inside] - start]).tolist())
    return rows_by_store


def _first(rows: Rows, limit: int | None) -> dict[str, list[int]]:
    """The first ``limit`` rows over all datasets."""
    pairs = [(name, row) for name, of_it in rows.items() for row in of_it][:limit]
    return {name: [row for owner, row in pairs if owner == name] for name in rows}


def _examples(section: DataSection, rows: Rows, *, reading: Reading) -> list[Example]:
    catalog = Catalog(section)
    examples: list[Example] = []
    for name, numbers in rows.items():
        if numbers:
            rows_of_it = read_rows(catalog.entry(name), section, np.array(numbers), reading)
            examples += [row for row in rows_of_it if isinstance(row, Example)]
    return examples
