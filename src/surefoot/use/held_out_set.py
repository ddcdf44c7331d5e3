"""The examples that a recipe keeps out of training: the same rows on which training evaluates."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..data.example import Example
from ..data.rows.catalog import Catalog
from ..data.rows.rows import read_rows
from ..data.section import DataSection
from ..data.store.dataset import EncodedDataset
from ..data.text.codec import Codec
from ..data.training_data import open_stream, prepare
from ..errors import ModelError, RecipeError
from ..model.loading import resolve
from ..recipe.recipe import Recipe
from ..recipe.recipe_data import encoding_of, open_codec

logger = logging.getLogger(__name__)
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
    section = recipe.data
    names = [str(name) for name in section.eval_datasets] if dataset is None else [dataset]
    if dataset and dataset in section.datasets and dataset not in section.eval_datasets:
        if section.val_size:
            rows = {dataset: _split(recipe, codec)[dataset]}
            return [HeldOut(dataset, _examples(section, _first(rows, limit)))]
        logger.warning(
            "dataset %r is used for training: its evaluation metrics do not measure generalization",
            dataset,
        )
    if names:
        each = ((name, {name: _rows_of(recipe, codec, name)}) for name in names)
        return [HeldOut(name, _examples(section, _first(rows, limit))) for name, rows in each]
    if not section.val_size:
        raise RecipeError(
            "nothing to evaluate on; set data.val_size or data.eval_datasets, or name a dataset "
            "with --dataset"
        )
    rows = _split(recipe, codec)
    return [HeldOut(VAL, _examples(section, _first(rows, limit)))]


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
        found = open_stream(encoding_of(recipe, codec))
        numbers = found.train.rows(int(found.held[-1]) + 1)[found.held]
        return dict(found.train.rows_by_dataset(numbers))
    rows = _rows(prepare(encoding_of(recipe, codec)).evals[""])
    return dict(zip(map(str, recipe.data.datasets), rows, strict=True))


def _rows(dataset: EncodedDataset) -> list[list[int]]:
    """The rows of each store that the dataset uses."""
    starts = np.cumsum([0, *(len(store) for store in dataset.stores)])
    found = []
    for store, start in zip(dataset.stores, starts, strict=False):
        inside = (dataset.index >= start) & (dataset.index < start + len(store))
        found.append(np.unique(store.rows[dataset.index[inside] - start]).tolist())
    return found


def _first(rows: Rows, limit: int | None) -> dict[str, list[int]]:
    """The first ``limit`` rows over all datasets."""
    pairs = [(name, row) for name, of_it in rows.items() for row in of_it][:limit]
    return {name: [row for found, row in pairs if found == name] for name in rows}


def _examples(section: DataSection, rows: Rows) -> list[Example]:
    catalog = Catalog(section)
    found: list[Example] = []
    for name, wanted in rows.items():
        if wanted:
            rows_of_it = read_rows(catalog.entry(name), section, np.array(wanted))
            found += [row for row in rows_of_it if isinstance(row, Example)]
    return found
